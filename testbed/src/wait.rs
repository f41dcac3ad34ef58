//! Waiting for conditions.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Interval between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The longest wait between two looks; at most twice this counts of the time that passed.
const MAX_COUNTED_WAIT: Duration = Duration::from_secs(1);

/// A limit on waiting. Time in which this process did not run does not count: its guests did not
/// run either.
#[derive(Debug)]
pub(crate) struct Deadline {
    left: Duration,
    looked: Instant,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { left: limit, looked: Instant::now() }
    }

    /// Returns how long to wait before the next look; `None` when time is over.
    pub(crate) fn left(&mut self) -> Option<Duration> {
        self.left = self.left.saturating_sub(self.looked.elapsed().min(2 * MAX_COUNTED_WAIT));
        self.looked = Instant::now();
        (!self.left.is_zero()).then(|| self.left.min(MAX_COUNTED_WAIT))
    }
}

/// Waits until `condition` holds.
///
/// # Errors
/// If `condition` does not hold within `limit` (the error names `what`), or fails itself.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    wait_for(what, limit, || Ok(condition()?.then_some(())))
}

/// Waits until `condition` returns a value; returns that value.
///
/// # Errors
/// As [`wait_until`].
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let mut deadline = Deadline::after(limit);
    loop {
        if let Some(found) = condition()? {
            return Ok(found);
        }
        if deadline.left().is_none() {
            bail!("timed out after {limit:?} waiting for: {what}");
        }
        thread::sleep(POLL_INTERVAL);
    }
}
