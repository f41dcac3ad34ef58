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
#[path = "../../../../store/tests/store/random/mod.rs"]
mod random;
pub mod sys;
#[path = "../../../../hosts/src/wait.rs"]
mod wait;

pub use random::Random;
pub use wait::wait_until;
