//! The lease that the examples serve.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::{fs, process};

use aquifer_page::Bytes;
use aquifer_store::tmpfs::stores;
use aquifer_store::{Lease, LeaseRecord, Store};

/// Returns a lease of `capacity` in `dir`: the one that an earlier run left there, or a new one.
///
/// Without `dir`, the lease leaves no file behind.
pub fn lease(capacity: Bytes, dir: Option<String>) -> Result<Arc<Lease>, Box<dyn Error>> {
    let stays = dir.is_some();
    let dir = match dir {
        Some(dir) => PathBuf::from(dir),
        None => stores()?.join(format!("example-{}", process::id())),
    };
    let store = Store::open(&dir)?;
    let record = LeaseRecord::new("localhost".parse()?, capacity);
    let lease = match store.leases().pop() {
        Some(left_by_the_last_run) => left_by_the_last_run,
        None => store.create(record)?,
    };
    if !stays {
        // The open file keeps the memory, which the kernel frees when this process exits.
        fs::remove_dir_all(&dir)?;
    }
    Ok(lease)
}
