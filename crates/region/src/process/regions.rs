//! The tmpfs that holds the regions.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_store::tmpfs::{self, is_mounted};
use rustix::mount::{UnmountFlags, unmount};

use crate::folios;

/// The first characters of the name of a directory in which a region is being made. No region's
/// name begins with a dot.
pub(super) const UNFINISHED: &str = "..";

/// Where a kernel that knows huge pages has its settings for them.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";

/// Refuses a file system other than tmpfs. Only there a hole punched in a file frees its memory.
fn check_tmpfs(directory: &Path) -> io::Result<()> {
    if tmpfs::is_tmpfs(&rustix::fs::statfs(directory)?) {
        return Ok(());
    }
    let why = "another file system is mounted there; unmount it, and Aquifer mounts a tmpfs";
    Err(io::Error::other(why))
}

/// Locks the file system there against mounts and removal by other processes, while the returned
/// file is open.
fn hold(directory: &Path) -> io::Result<File> {
    let parent = File::open(directory.parent().unwrap_or(Path::new("/")))?;
    parent.lock()?;
    Ok(parent)
}

/// Mounts a tmpfs there for root only, if nothing is mounted. It has no size limit, as each region
/// has one. Regions that nobody watches get huge pages, if the engine can tell that none is left
/// before pages move singly. While the returned file is open, no process removes the still empty
/// tmpfs.
pub(super) fn ensure(directory: &Path) -> io::Result<File> {
    fs::create_dir_all(directory)?;
    let held = hold(directory)?;
    if is_mounted(directory)? {
        check_tmpfs(directory)?;
        discard_unfinished(directory);
        return Ok(held);
    }
    // The kernel must not swap out the local cache, or each miss would cost two.
    let huge = Path::new(HUGE_PAGES).exists() && folios::are_known();
    tmpfs::mount("aquifer-regions", directory, "0", huge)?;
    Ok(held)
}

/// Removes the files of regions whose makers died: makers hold the directory, as the caller does.
fn discard_unfinished(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().as_bytes().starts_with(UNFINISHED.as_bytes()) {
            // An error only leaves a few small files.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Unmounts the tmpfs if it is empty. Waits up to 5 s for ending processes to close their files
/// there.
pub(super) fn release_soon(directory: &Path) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !release(directory) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Unmounts the tmpfs if it is empty. Returns false if it should be gone but a process still has a
/// file open.
pub(super) fn release(directory: &Path) -> bool {
    // If there is no such directory, there is nothing to unmount.
    let Ok(_held) = hold(directory) else { return true };
    discard_unfinished(directory);
    let empty = fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none());
    if !empty || !is_mounted(directory).unwrap_or(false) {
        return true;
    }
    // The unmount fails while a file is open.
    unmount(directory, UnmountFlags::NOFOLLOW).is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_region_whose_maker_died_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("regions");
        let unfinished = directory.join("..one");
        let make = || {
            fs::create_dir_all(&unfinished).unwrap();
            fs::write(unfinished.join("table"), b"1").unwrap();
        };
        drop(ensure(&directory).unwrap());
        make();
        drop(ensure(&directory).unwrap());
        assert!(!unfinished.exists());
        make();
        assert!(release(&directory));
        assert!(!is_mounted(&directory).unwrap());
    }

    #[test]
    fn a_mount_tells_whether_it_has_huge_pages() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("regions");
        fs::create_dir(&directory).unwrap();
        let is_forced = fs::read_to_string(format!("{HUGE_PAGES}/shmem_enabled"))
            .is_ok_and(|setting| setting.contains("[force]"));
        for huge in [false, true] {
            tmpfs::mount("aquifer-test", &directory, "1M", huge).unwrap();
            let device = fs::metadata(&directory).unwrap().dev();
            let may_have = tmpfs::may_have_huge_pages(device);
            unmount(&directory, UnmountFlags::NOFOLLOW).unwrap();
            assert_eq!(may_have, huge || is_forced);
        }
    }

    #[test]
    fn no_region_is_swapped_out() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("regions");
        ensure(&directory).unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is = directory.to_str().unwrap();
        let mount = mounts.lines().find(|line| line.split(' ').nth(4) == Some(is));
        let mount = mount.map(str::to_owned);
        let released = release(&directory);
        assert!(mount.unwrap().ends_with("noswap"), "{mounts}");
        assert!(released);
    }
}
