//! A test that shared pages outlive the process that serves them, whenever it dies.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};
use aquifer_store::Store;

use crate::alone::alone;
use crate::common::{frames_taken, shm_dir};
use crate::example::example;
use crate::versions::{GROUPS, PAGES, THREADS, content};

const PAGE: u64 = PAGE_SIZE as u64;
/// How many writers the test kills.
const KILLS: usize = 12;

/// A child process; dropping it kills the child.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the writer until it has written many pages, then kills it.
fn write_and_be_killed(dir: &Path, acknowledged: &Path) {
    let mut command = Command::new(example("aquifer-store", "shared_writer"));
    let child = command.args([dir, acknowledged]).stdout(Stdio::piped()).spawn().unwrap();
    let mut guard = Guard(child);
    let mut said = String::new();
    BufReader::new(guard.0.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "going\n");
    drop(guard);
}

/// Checks that each page holds its acknowledged version or the next; returns the number of stored
/// pages.
fn check_pages(store: &Store, acknowledged: &File) -> usize {
    let mut stored = 0;
    for thread in 0..THREADS {
        let lease = store.get(LeaseId(thread as u128)).unwrap();
        for page in 0..PAGES {
            let mut version = [0; 4];
            acknowledged.read_exact_at(&mut version, (thread * PAGES + page) as u64 * 4).unwrap();
            let version = u32::from_le_bytes(version);
            let mut bytes = [0; PAGE_SIZE];
            lease.read(page as u64 * PAGE, &mut bytes).unwrap();
            let is = |version| content(page, version).unwrap_or([0; PAGE_SIZE]) == bytes;
            assert!(
                is(version) || is(version + 1),
                "page {page} of {thread} is not version {version}"
            );
            if !is(version) {
                // The next writer repeats this version, which changes nothing.
                stored += usize::from(content(page, version + 1).is_some());
            } else {
                stored += usize::from(content(page, version).is_some());
            }
        }
    }
    stored
}

#[test]
fn a_process_killed_amid_writes_loses_no_page_and_no_frame() {
    alone("sharing_killed::a_process_killed_amid_writes_loses_no_page_and_no_frame", || {
        let (dir, beside) = (shm_dir(), shm_dir());
        let acknowledged = beside.path().join("acknowledged");
        for _ in 0..KILLS {
            write_and_be_killed(dir.path(), &acknowledged);
            let store = Store::open(dir.path()).unwrap();
            assert!(store.findings().is_empty(), "{:?}", store.findings());
            store.audit().unwrap();
            let stored = check_pages(&store, &File::open(&acknowledged).unwrap());
            let usage = store.usage();
            assert_eq!(usage.stored, Bytes(stored as u64 * PAGE));
            for group in GROUPS {
                let shared = usage.groups[&group.parse().unwrap()].shared;
                assert_eq!(
                    shared.taken,
                    shared.stored - shared.saved,
                    "nothing but what is referred to"
                );
                assert_eq!(shared.taken, frames_taken(dir.path(), group));
                assert!(shared.saved > Bytes::ZERO && shared.shared_frames > 0);
            }
        }
    });
}
