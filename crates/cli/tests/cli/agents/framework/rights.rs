//! The requirements of these tests, and the right to swap, which only one test has at a time.

use std::fs::File;

use aquifer_cli::cgroup::Hierarchy;
use rustix::fs::{FlockOperation, flock};

/// Returns whether these tests cannot run here: they need root and memory cgroups that count swap.
pub fn lacks_rights() -> bool {
    let root = rustix::process::geteuid().is_root();
    let lacks = !root
        || Hierarchy::find().is_ok_and(|found| !found.counts_swap())
        || Hierarchy::find().is_err();
    if lacks {
        eprintln!("skipped: needs root and memory cgroups that count swap");
    }
    lacks
}

/// Waits for the right to put swap on, and takes it for the whole machine while the file is open.
///
/// A swap device belongs to the whole kernel: hosts of one test would swap to the memory that
/// another test borrowed.
#[must_use]
pub fn the_kernels_swap() -> File {
    let path = std::env::temp_dir().join("aquifer-swap-tests.lock");
    let file = File::options().create(true).append(true).open(&path).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    file
}
