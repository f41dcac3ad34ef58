//! What tests of Aquifer in guests are written with.

mod built;
mod cluster;
mod here;
mod load;
mod picture;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use built::{aquifer, example, test, tool, with_script};
pub use cluster::{Aquifer, Cluster, member, with_admitted};
pub use here::Here;
pub use load::Load;

/// How long anything may take that must happen, on emulated hosts of a busy machine: it is for hangs.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// The modules of soft-RoCE, in the order in which it takes them.
pub const SOFT_ROCE: [&str; 3] = ["crc32-pclmul", "crc32_generic", "rdma_rxe"];

/// Says what comes next, and when: shown when the test fails.
pub fn step(what: &str) {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    eprintln!("{:6.1} s  {what}", BEGAN.get_or_init(Instant::now).elapsed().as_secs_f64());
}
