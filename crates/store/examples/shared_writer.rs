//! A writer to leases that share pages, for tests that kill it: `shared_writer DIR ACKNOWLEDGED`.
//!
//! Each thread has a lease of one of two groups, and writes one version after another to its pages.
//! After each write it notes the version in the file `ACKNOWLEDGED`, 4 bytes per page. The program
//! prints "going" after many writes, and continues where a killed one stopped.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};
use aquifer_store::{Lease, LeaseRecord, Store};

#[path = "../tests/store/versions/mod.rs"]
mod versions;

use versions::{GROUPS, PAGES, THREADS, content};

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let (Some(dir), Some(acknowledged)) = (arguments.next(), arguments.next()) else {
        return Err("usage: shared_writer DIR ACKNOWLEDGED".into());
    };
    let store = Store::open(Path::new(&dir))?;
    let mut options = OpenOptions::new();
    let acknowledged =
        options.read(true).write(true).create(true).truncate(false).open(acknowledged)?;
    acknowledged.set_len((THREADS * PAGES * 4) as u64)?;
    let written = AtomicU32::new(0);
    let failed = Mutex::new(None);
    // Creates all leases before any write: a test that kills this program checks all of them.
    let leases = (0..THREADS).map(|thread| lease(&store, thread)).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        for (thread, lease) in leases.iter().enumerate() {
            let (acknowledged, written, failed) = (&acknowledged, &written, &failed);
            scope.spawn(move || {
                let result = write_for_ever(lease, thread, acknowledged, written);
                *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = result.err();
            });
        }
    });
    failed.into_inner()?.map_or(Ok(()), Err)
}

/// Returns the lease of a thread: the one that an earlier run made, or a new one.
fn lease(store: &Store, thread: usize) -> Result<Arc<Lease>, Failure> {
    let id = LeaseId(thread as u128);
    if let Some(lease) = store.get(id) {
        return Ok(lease);
    }
    let capacity = Bytes((PAGES * PAGE_SIZE) as u64);
    Ok(store.create(LeaseRecord {
        id,
        group: GROUPS[thread % GROUPS.len()].parse()?,
        shared: true,
        ..LeaseRecord::new("borrower".parse()?, capacity)
    })?)
}

fn write_for_ever(
    lease: &Lease,
    thread: usize,
    acknowledged: &File,
    written: &AtomicU32,
) -> Result<(), Failure> {
    for round in 0usize.. {
        // Strides through the pages, so that frames do not follow one another either.
        let page = round * 7919 % PAGES;
        let (place, offset) = ((thread * PAGES + page) as u64 * 4, (page * PAGE_SIZE) as u64);
        let mut version = [0; 4];
        acknowledged.read_exact_at(&mut version, place)?;
        let version = u32::from_le_bytes(version) + 1;
        match content(page, version) {
            Some(content) => lease.write(offset, &content)?,
            None => lease.discard(offset, PAGE_SIZE as u64)?,
        }
        acknowledged.write_all_at(&version.to_le_bytes(), place)?;
        if written.fetch_add(1, Ordering::Relaxed) == 20_000 {
            println!("going");
        }
    }
    Ok(())
}
