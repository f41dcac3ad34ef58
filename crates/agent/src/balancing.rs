//! The agent's balancer, which moves memory between this host's VMs.

use std::path::Path;

use aquifer_control::balance::Config;
use aquifer_vm::VmError;
use aquifer_vm::memory::{Balancing, Moved, Resized};

use crate::background::{Background, GLANCE};
use crate::driver::Journal;

/// Starts the balancer's thread. Dropping the result leaves resizes in progress to the VMs'
/// supervisors.
///
/// # Errors
/// If the configuration is invalid, or the thread cannot start.
pub(crate) fn start(
    state: &Path,
    exe: &Path,
    config: &Config,
    journal: Journal,
) -> Result<Background, VmError> {
    let balancing = Balancing::new(state, exe, config.clone())?;
    // A resize may have freed memory: the next round hands that memory out at once.
    let rest = |balancing: &mut Balancing| balancing.wait(GLANCE).inspect(log).is_some();
    Background::start("balancer", balancing, move |balancing| balance(balancing, &journal), rest)
        .map_err(|source| VmError::Io { what: "cannot start a thread".to_owned(), source })
}

fn balance(balancing: &mut Balancing, journal: &Journal) {
    match balancing.step(true) {
        Ok(turn) => {
            turn.moved.iter().for_each(log);
            for is in &turn.plan.moves {
                let decision = turn.plan.decisions.iter().find(|decision| decision.vm == is.vm);
                let why = decision.map_or(String::new(), ToString::to_string);
                tracing::info!(vm = %is.vm, from = %is.from, to = %is.to, "{why}");
                let what = format!("resizes VM {} from {} to {}: {why}", is.vm, is.from, is.to);
                journal.decided_about(&is.vm, what);
            }
        }
        Err(error) => tracing::warn!("cannot balance the memory of VMs: {error}"),
    }
}

fn log(moved: &Moved) {
    match &moved.end {
        Ok(Resized { from, reached, total_ms, why: None, .. }) => {
            tracing::info!(vm = %moved.is.vm, %from, %reached, "resized in {total_ms:.0} ms");
        }
        Ok(Resized { from, reached, why: Some(why), .. }) => {
            tracing::warn!(vm = %moved.is.vm, %from, %reached, "resized in part: {why}");
        }
        Err(error) => tracing::warn!(vm = %moved.is.vm, "cannot resize: {error}"),
    }
}
