//! The file system that regions are on.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Whether something is mounted there.
fn is_mounted(directory: &Path) -> io::Result<bool> {
    let parent = directory.parent().unwrap_or(Path::new("/"));
    Ok(fs::metadata(directory)?.dev() != fs::metadata(parent)?.dev())
}

/// Mounts a tmpfs there, for root only, if nothing is: without a limit of its own, as each region has one, and without huge pages,
/// as single pages come and go.
pub(super) fn ensure(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    if is_mounted(directory)? {
        return Ok(());
    }
    let options = CString::new("size=0,nr_inodes=0,mode=700,huge=never").expect("no zero in it");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("aquifer-regions", directory, "tmpfs", flags, options.as_c_str())?)
}

/// Takes it away if nothing is in it, as soon as processes that are ending have closed their files there.
pub(super) fn release_soon(directory: &Path) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !release(directory) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Takes it away if nothing is in it. False if it should be gone and is not: somebody still has one of its files open.
pub(super) fn release(directory: &Path) -> bool {
    let empty = fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none());
    if !empty || !is_mounted(directory).unwrap_or(false) {
        return true;
    }
    // Somebody may have made a region meanwhile: then it is busy, and stays.
    unmount(directory, UnmountFlags::NOFOLLOW).is_ok()
}
