//! What these tests need of the machine, and what they must not share with others.

use std::fs::File;

use aquifer_cli::cgroup::Hierarchy;
use rustix::fs::{FlockOperation, flock};

/// Whether these tests cannot run here: they need root and a memory cgroup hierarchy that counts swap.
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

/// Waits for, and takes, the right to put swap on: a swap device belongs to the whole kernel, and what one test
/// borrowed, the hosts of another would swap to. Held as long as the file is open, on the whole machine.
#[must_use]
pub fn the_kernels_swap() -> File {
    let path = std::env::temp_dir().join("aquifer-swap-tests.lock");
    let file = File::options().create(true).append(true).open(&path).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    file
}
