//! Faults that could not be served: they are retried, until they are given up.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_region_client::Filled;

use super::Engine;
use super::fault::FaultRequest;
use crate::counters::add;
use crate::error::RegionError;
use crate::lock;

/// The interval between retries of faults that could not be served.
const RETRY: Duration = Duration::from_millis(250);

/// A fault that could not be served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stalled {
    since: Instant,
    /// The fault waits for its retry; false during the retry.
    waits: bool,
}

impl Engine {
    /// Records a fault that could not be served, for a retry, or gives it up after the timeout.
    pub(super) fn stall(&self, request: &FaultRequest, error: &RegionError) {
        let &FaultRequest { ref program, page, began, .. } = request;
        add(&self.counters.stalled_faults, 1);
        self.is_in_trouble(error);
        if program.is_replaced() {
            // Nobody retries faults of its old id. The thread faults again, under the new one.
            program.wake(&(page..page + 1));
            return;
        }
        let mut stalled = lock(&self.faults.stalled);
        let fault =
            stalled.entry((program.id, page)).or_insert(Stalled { since: began, waits: true });
        fault.waits = true;
        let gives_up = self.faults.timeout.is_some_and(|timeout| fault.since.elapsed() >= timeout);
        if gives_up && self.gives_up(request, error) {
            stalled.remove(&(program.id, page));
            return;
        }
        drop(stalled);
        self.faults.retry.notify_one();
    }

    /// Poisons a page for which a thread has waited too long. Returns false if the fault must be
    /// retried.
    fn gives_up(&self, request: &FaultRequest, error: &RegionError) -> bool {
        let (program, page) = (&request.program, request.page);
        match program.poison(page) {
            Ok(Filled::Now) => {
                tracing::error!(
                    program = program.name(),
                    page,
                    "the fault timed out, and the program gets SIGBUS: {error}"
                );
                add(&self.counters.given_up, 1);
            }
            // No thread waits there any more.
            Ok(Filled::Gone) => {}
            // The page came just now. Or it is shared and readable, and the writer continues to
            // wait.
            Ok(Filled::Before) => return false,
            Err(refused) => {
                tracing::warn!(
                    program = program.name(),
                    page,
                    "cannot end the timed-out fault ({error}): {refused}"
                );
                return false;
            }
        }
        program.wake(&(page..page + 1));
        true
    }

    /// Retries faults that could not be served, until the engine ends.
    pub(super) fn retry_stalled(&self) {
        while !self.has_ended() {
            let none = lock(&self.faults.stalled);
            let some = self.faults.retry.wait_while(none, |stalled| {
                !stalled.values().any(|fault| fault.waits) && !self.has_ended()
            });
            drop(some);
            thread::sleep(RETRY);
            let mut stalled = lock(&self.faults.stalled);
            let waiting: Vec<_> =
                stalled.iter().filter(|(_, fault)| fault.waits).map(|(fault, _)| *fault).collect();
            stalled.values_mut().for_each(|fault| fault.waits = false);
            // Programs that are gone have no waiting threads.
            let known = |id| self.program(id).is_some();
            stalled.retain(|(id, _), _| known(*id));
            drop(stalled);
            for (id, page) in waiting {
                if let Some(program) = self.program(id) {
                    program.wake(&(page..page + 1));
                }
            }
        }
    }

    /// Logs the error, unless the engine has already reported trouble.
    pub(super) fn is_in_trouble(&self, error: &RegionError) {
        if !self.faults.trouble.swap(true, Ordering::Relaxed) {
            tracing::warn!("programs wait: {error}");
        }
    }

    pub(super) fn is_out_of_trouble(&self) {
        if self.faults.trouble.load(Ordering::Relaxed)
            && self.faults.trouble.swap(false, Ordering::Relaxed)
        {
            tracing::info!("pages can be fetched again");
            // The retry of the remaining faults is under way.
            lock(&self.faults.stalled).retain(|_, fault| fault.waits);
        }
    }
}
