//! Waiting for conditions in tests, with a deadline that only a hang can reach.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest wait, generous for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until `condition` holds.
///
/// # Panics
/// If it does not hold within two minutes.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `condition` returns a value.
///
/// # Panics
/// As [`wait_until`].
#[track_caller]
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        sleep(Duration::from_millis(10));
    }
}
