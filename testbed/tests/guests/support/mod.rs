//! What tests of Aquifer in guests are written with.

mod built;
mod cluster;
mod load;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use built::{aquifer, example, test, tool};
pub use cluster::{Aquifer, member, with_admitted, with_cluster};
pub use load::Load;

/// How long anything may take that must happen, on emulated hosts of a busy machine: it is for hangs.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Says what comes next, and when: shown when the test fails.
pub fn step(what: &str) {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    eprintln!("{:6.1} s  {what}", BEGAN.get_or_init(Instant::now).elapsed().as_secs_f64());
}
