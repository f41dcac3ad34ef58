//! Helpers that the store's tests share.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

#[path = "../random/mod.rs"]
mod random;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use aquifer_page::Bytes;
use aquifer_store::{Lease, LeaseRecord, Store};
pub use random::Random;

/// Creates a temporary directory on a tmpfs; it vanishes even if the test fails.
pub fn shm_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("aquifer-test-").tempdir_in("/dev/shm").unwrap()
}

/// Creates a store in a temporary directory, which can also hold a socket and other files.
pub fn temporary_store() -> (tempfile::TempDir, Store) {
    let dir = shm_dir();
    let store = Store::open(&dir.path().join("store")).unwrap();
    (dir, store)
}

pub fn record(capacity: Bytes, quota: Bytes) -> LeaseRecord {
    let group = "tenant".parse().unwrap();
    LeaseRecord { group, quota, ..LeaseRecord::new("borrower".parse().unwrap(), capacity) }
}

/// Returns a record of a lease that shares pages with its group.
pub fn shared_record(group: &str, capacity: Bytes) -> LeaseRecord {
    LeaseRecord { group: group.parse().unwrap(), shared: true, ..record(capacity, capacity) }
}

/// Creates a store with one sharing lease of `capacity`.
pub fn one_shared_lease(capacity: Bytes) -> (tempfile::TempDir, Store, Arc<Lease>) {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let lease = store.create(shared_record("tenant", capacity)).unwrap();
    (dir, store, lease)
}

/// Creates a store with one lease of `capacity`.
pub fn one_lease(capacity: Bytes) -> (tempfile::TempDir, Store, Arc<Lease>) {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let lease = store.create(record(capacity, capacity)).unwrap();
    (dir, store, lease)
}

/// Returns the bytes that the kernel accounts to the lease's file, or to the frames of its group.
pub fn taken(dir: &Path, lease: &Lease) -> u64 {
    if lease.is_shared() {
        return frames_taken(dir, lease.group().as_str()).0;
    }
    fs::metadata(dir.join(format!("{}.pages", lease.id()))).unwrap().blocks() * 512
}

/// Returns the bytes that the kernel accounts to the frames of a group.
pub fn frames_taken(dir: &Path, group: &str) -> Bytes {
    Bytes(fs::metadata(dir.join(format!("{group}.frames"))).unwrap().blocks() * 512)
}

/// Returns a field of `/proc/self/smaps_rollup` (`Pss` counts each page once).
pub fn rollup(field: &str) -> Bytes {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    Bytes::kib(line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap())
}

/// Returns the memory of this process's heap and leases.
///
/// It excludes code: the share of a library depends on how many other processes map it.
pub fn own_memory() -> Bytes {
    rollup("Pss_Anon") + rollup("Pss_Shmem")
}
