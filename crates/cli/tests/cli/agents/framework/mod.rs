//! Hosts, loads and strangers for tests, and functions that wait for them.

mod answer;
mod cluster;
mod host;
mod load;
mod rights;
mod spec;
pub mod stranger;

use std::time::{Duration, Instant};

pub use answer::Answer;
pub use cluster::{Cluster, address, init};
pub use host::{Host, lives, process};
pub use load::Load;
pub use rights::{lacks_rights, the_kernels_swap};
pub use spec::Spec;
pub use stranger::{Identity, Stranger};

/// The longest that any step without much data may take, generous for a busy machine.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
///
/// # Panics
/// If it does not hold within twice [`STEP_TIMEOUT`].
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `condition` returns a value.
#[track_caller]
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + 2 * STEP_TIMEOUT;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
