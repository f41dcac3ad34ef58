//! Waiting for what must happen.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How often is looked.
const PERIOD: Duration = Duration::from_millis(100);

/// Waits until `condition` holds.
///
/// # Errors
/// If it does not within `limit`, naming `what` it is; what `condition` fails with.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
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
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = condition()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("after {limit:?} still not: {what}");
        }
        thread::sleep(PERIOD);
    }
}
