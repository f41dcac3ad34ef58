//! Waiting for conditions, which a signal ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, Result};

/// The time between two polls.
const LOOK: Duration = Duration::from_millis(5);

/// A wait for conditions; the flag is set by a signal that asks the demo to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait<'a>(pub(super) &'a AtomicBool);

impl Wait<'_> {
    /// Waits until `is` returns a value; fails if `timeout` passes first.
    pub(super) fn until<T>(
        self,
        what: &str,
        timeout: Duration,
        is: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let late = || Failure::new(what, format!("not within {} s", timeout.as_secs()));
        self.at_most(timeout, is)?.ok_or_else(late)
    }

    /// Waits until `is` returns a value; `None` if `timeout` passes first.
    pub(super) fn at_most<T>(
        self,
        timeout: Duration,
        mut is: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(found) = is()? {
                return Ok(Some(found));
            }
            if self.0.load(Ordering::Relaxed) {
                return Err(Failure::new("the demo", "interrupted"));
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            thread::sleep(LOOK);
        }
    }
}
