//! The file system that regions are on.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_store::tmpfs::{self, is_mounted};
use rustix::mount::{UnmountFlags, unmount};

/// Refuses a file system on which a page that is taken out of a file would still be somewhere, or
/// nowhere.
fn check_tmpfs(directory: &Path) -> io::Result<()> {
    if tmpfs::is_tmpfs(&rustix::fs::statfs(directory)?) {
        return Ok(());
    }
    let why = "something else than a tmpfs is mounted there: unmount it, and regions get their own";
    Err(io::Error::other(why))
}

/// Keeps anybody else from mounting or taking away the file system there, for as long as what is returned lives.
fn hold(directory: &Path) -> io::Result<File> {
    let parent = File::open(directory.parent().unwrap_or(Path::new("/")))?;
    parent.lock()?;
    Ok(parent)
}

/// Mounts a tmpfs there, for root only, if nothing is: without a limit of its own, as each region has one, and without huge pages,
/// as single pages come and go. As long as what is returned lives nobody takes it away because nothing is in it yet.
pub(super) fn ensure(directory: &Path) -> io::Result<File> {
    fs::create_dir_all(directory)?;
    let held = hold(directory)?;
    if is_mounted(directory)? {
        check_tmpfs(directory)?;
        return Ok(held);
    }
    // The kernel must not swap out the local cache, or each miss would cost two.
    tmpfs::mount("aquifer-regions", directory, "0")?;
    Ok(held)
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
    // Where there is no such directory there is nothing to take away.
    let Ok(_held) = hold(directory) else { return true };
    let empty = fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none());
    if !empty || !is_mounted(directory).unwrap_or(false) {
        return true;
    }
    // Where a file is still open it is busy, and stays.
    unmount(directory, UnmountFlags::NOFOLLOW).is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

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
