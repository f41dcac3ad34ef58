//! Waiting for what must happen.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How often is looked.
const PERIOD: Duration = Duration::from_millis(100);

/// The most that counts of the time between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// A limit on waiting. Time in which this process did not run does not count: then its guests did not either.
#[derive(Debug)]
pub(crate) struct Deadline {
    left: Duration,
    looked: Instant,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { left: limit, looked: Instant::now() }
    }

    /// How long may be waited before the next look; nothing when time is over.
    pub(crate) fn left(&mut self) -> Option<Duration> {
        self.left = self.left.saturating_sub(self.looked.elapsed().min(2 * LOOK));
        self.looked = Instant::now();
        (!self.left.is_zero()).then(|| self.left.min(LOOK))
    }
}

/// Waits until `condition` holds.
///
/// # Errors
/// If it does not within `limit`, naming `what` it is; what `condition` fails with.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    wait_for(what, limit, || Ok(condition()?.then_some(())))
}

/// The same for a condition that brings something.
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
            bail!("after {limit:?} still not: {what}");
        }
        thread::sleep(PERIOD);
    }
}
