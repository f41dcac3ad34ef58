//! Helpers that the tests of this crate share.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test binary uses a part; a test that cannot go on fails"
)]

pub mod aligned;
pub mod cgroup;
#[path = "../../../../store/tests/store/example/mod.rs"]
pub mod example;
#[path = "../../../../nbd/tests/nbd/freezing/mod.rs"]
mod freezing;
#[path = "../../../../volume/tests/volume/common/ours.rs"]
pub mod lender;
pub mod ram_disk;
pub mod random;
pub mod sys;

use std::time::{Duration, Instant};

/// Waits until `condition` holds. Panics with `what` if it does not within `limit`.
pub fn wait_for(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen within {limit:?}");
        std::thread::yield_now();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Timeout for steps that the kernel does at once, with room for a loaded machine.
pub const SOON: Duration = Duration::from_secs(120);

/// Waits until `condition` holds, at most [`SOON`].
pub fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_for(what, SOON, condition);
}
