//! The balancer of this host's VMs, on a thread of its own: what it does may take seconds.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::balance::Config;
use aquifer_guest::GuestError;
use aquifer_guest::memory::{Balancing, Moved, Resized};

/// How often VMs are looked at.
const PERIOD: Duration = Duration::from_secs(1);

/// How often it is seen that it is to end.
const GLANCE: Duration = Duration::from_millis(100);

/// A balancer at work. Dropping it ends that; what it has begun is ended by the VMs' keepers.
#[derive(Debug)]
pub(crate) struct Balancer(Arc<AtomicBool>);

impl Balancer {
    /// Starts it.
    ///
    /// # Errors
    /// If the configuration makes no sense, or there can be no thread.
    pub(crate) fn start(state: &Path, exe: &Path, config: &Config) -> Result<Self, GuestError> {
        let balancing = Balancing::new(state, exe, config.clone())?;
        let ends = Arc::new(AtomicBool::new(false));
        let (end, state) = (ends.clone(), state.to_owned());
        let thread = thread::Builder::new().name("balancer".to_owned());
        let started = thread.spawn(move || balance(balancing, &state, &end));
        started.map_err(|source| GuestError::Io { what: "cannot start a thread".to_owned(), source })?;
        Ok(Self(ends))
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn balance(mut balancing: Balancing, state: &Path, end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        let next = Instant::now() + PERIOD;
        match balancing.turn(true) {
            Ok(turn) => {
                turn.moved.iter().for_each(log);
                for is in &turn.plan.moves {
                    let verdict = turn.plan.verdicts.iter().find(|verdict| verdict.vm == is.vm);
                    tracing::info!(vm = %is.vm, from = %is.from, to = %is.to, "{}", verdict.map_or(String::new(), ToString::to_string));
                }
            }
            Err(error) => {
                tracing::warn!(state = %state.display(), "the memory of VMs is not balanced: {error}")
            }
        }
        while Instant::now() < next && !end.load(Ordering::Relaxed) {
            // What is given is given on at once.
            if let Some(moved) = balancing.wait(GLANCE) {
                log(&moved);
                break;
            }
        }
    }
}

fn log(moved: &Moved) {
    match &moved.end {
        Ok(Resized { from, reached, total_ms, why: None, .. }) => {
            tracing::info!(vm = %moved.is.vm, %from, %reached, "resized in {total_ms:.0} ms");
        }
        Ok(Resized { from, reached, why: Some(why), .. }) => {
            tracing::warn!(vm = %moved.is.vm, %from, %reached, "resized a part of the way: {why}");
        }
        Err(error) => tracing::warn!(vm = %moved.is.vm, "not resized: {error}"),
    }
}
