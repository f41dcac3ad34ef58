//! The agent's balancer, which moves memory between this host's VMs, within the ledger.

use std::path::Path;
use std::time::Duration;

use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_control::balance::{Config, Move};
use aquifer_page::Bytes;
use aquifer_vm::VmError;
use aquifer_vm::memory::{Balancing, GrowthLimit, Moved, Resized, Room};
use tokio::runtime;

use crate::background::Background;
use crate::driver::{Command, Handle, Journal};

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
    handle: Handle,
) -> Result<Background, VmError> {
    let balancing = Balancing::new(state, exe, config.clone())?;
    // A resize may have freed memory: the next round hands that memory out at once.
    let rest = |balancing: &mut Balancing, at_most: Duration| {
        balancing.wait(at_most).iter().for_each(log);
    };
    let limit = Limit { handle, runtime: runtime::Handle::current() };
    let work = move |balancing: &mut Balancing| balance(balancing, &journal, &limit);
    Background::start_with_rest("balancer", balancing, work, rest)
        .map_err(|source| VmError::Io { what: "cannot start a thread".to_owned(), source })
}

/// The driver, which has the ledger. The balancer's thread waits for it.
struct Limit {
    handle: Handle,
    runtime: runtime::Handle,
}

impl GrowthLimit for Limit {
    /// An agent that ends has no room.
    fn room(&self) -> Option<Room> {
        let room = self.handle.ask(|reply| Command::Room { reply });
        self.runtime.block_on(room).unwrap_or(Some(Room::default()))
    }

    fn admits(&self, is: &Move) -> bool {
        let order = Claim::new(is.vm.clone(), ClaimPurpose::Vm, is.to);
        let admitted = self.handle.ask(|reply| Command::Claim { order, reply });
        let refusal = self.runtime.block_on(admitted).and_then(|admitted| admitted).err();
        if let Some(refusal) = &refusal {
            tracing::info!(vm = %is.vm, "the VM does not grow to {}: {}", is.to, refusal.error);
        }
        refusal.is_none()
    }

    fn recall(&self, bytes: Bytes) {
        // An agent that ends recalls nothing.
        let _ = self.runtime.block_on(self.handle.0.send(Command::Reclaim { bytes }));
    }
}

fn balance(balancing: &mut Balancing, journal: &Journal, limit: &Limit) {
    match balancing.step(true, Some(limit)) {
        Ok(turn) => {
            turn.moved.iter().for_each(log);
            for is in &turn.begun {
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
