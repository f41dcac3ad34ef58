//! Waiting for conditions, until there is a signal to end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::{Failure, Result};

/// How often it is looked.
const LOOK: Duration = Duration::from_millis(5);

/// Waits for conditions, until there is a signal to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait<'a>(pub(super) &'a AtomicBool);

impl Wait<'_> {
    /// Waits until there is something, and returns it; in vain is a failure.
    pub(super) fn until<T>(
        self,
        what: &str,
        patience: Duration,
        is: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let late = || Failure::new(what, format!("not within {} s", patience.as_secs()));
        self.at_most(patience, is)?.ok_or_else(late)
    }

    /// Waits until there is something, and returns it; nothing when that takes too long.
    pub(super) fn at_most<T>(
        self,
        patience: Duration,
        mut is: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + patience;
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
