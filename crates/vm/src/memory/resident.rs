//! The RAM of this host that a VM's memory takes.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use aquifer_page::Bytes;
use aquifer_region::process::client as regions;

use crate::process::Files;

/// The name of QEMU's memory files for guests.
const MEMFD: &str = "/memfd:memory-backend-memfd";

/// Returns the RAM of this host that a VM's memory takes; for a VM in the pool, its cache.
pub(crate) fn of(files: &Files) -> Bytes {
    match regions::status(&files.region()) {
        Ok(region) => region.usage.resident,
        Err(_) => files.pid().and_then(|pid| memory_files(pid).ok()).unwrap_or_default(),
    }
}

/// Returns the RAM that QEMU's memory files take. `st_blocks` counts units of 512 bytes
/// (stat(3type)).
pub(super) fn memory_files(pid: u32) -> io::Result<Bytes> {
    let mut all = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // A file that was closed meanwhile takes nothing.
        if fs::read_link(&path).is_ok_and(|to| is_memory(&to)) {
            all += fs::metadata(&path).map_or(0, |file| file.blocks() * 512);
        }
    }
    Ok(Bytes(all))
}

fn is_memory(file: &Path) -> bool {
    file.to_string_lossy().starts_with(MEMFD)
}
