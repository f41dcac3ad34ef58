//! Our own tmpfs mounts, from which the kernel swaps nothing out.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount as mount_as};

use crate::{StoreError, guarded};

/// `TMPFS_MAGIC` of `linux/magic.h`.
const MAGIC: u32 = 0x0102_1994;

/// The kernel's setting for huge pages of all tmpfs, which `force` imposes on each mount.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Default directory of stores.
const STORES: &str = "/dev/shm/aquifer";

/// Returns whether a file system is mounted at a directory.
///
/// # Errors
/// If the directory or its parent cannot be examined.
pub fn is_mounted(directory: &Path) -> io::Result<bool> {
    let parent = directory.parent().unwrap_or(Path::new("/"));
    Ok(fs::metadata(directory)?.dev() != fs::metadata(parent)?.dev())
}

/// Returns whether a file system is a tmpfs.
pub fn is_tmpfs(statfs: &rustix::fs::StatFs) -> bool {
    // The type of `f_type` differs between architectures; the number fits all of them.
    statfs.f_type as u32 == MAGIC
}

/// Mounts a tmpfs for root only, of this size (`size=` in tmpfs(5)). With `huge` it has huge pages
/// where a program advises so. Otherwise it has none, as leases take and free single pages. From
/// Linux 6.4 on the kernel swaps nothing of it out (`noswap`).
///
/// # Errors
/// If the kernel refuses.
pub fn mount(name: &str, directory: &Path, size: &str, huge: bool) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let huge = if huge { "advise" } else { "never" };
    let options = format!("size={size},nr_inodes=0,mode=700,huge={huge}");
    let mounted = |options: &str| {
        let options = std::ffi::CString::new(options).map_err(|_| Errno::INVAL)?;
        mount_as(name, directory, "tmpfs", flags, options.as_c_str())
    };
    match mounted(&format!("{options},noswap")) {
        // An older kernel, or one that allows it only in its first user namespace.
        Err(error @ (Errno::INVAL | Errno::PERM)) => {
            mounted(&options)?;
            tracing::warn!(
                "{} is mounted without 'noswap', which the kernel refuses ({error}): this host may \
                 swap out pages there; turn swap off, or use Linux 6.4 outside of user namespaces",
                directory.display()
            );
            Ok(())
        }
        done => Ok(done?),
    }
}

/// Returns the directory for stores: `/dev/shm/aquifer`, a tmpfs of its own, which this mounts if
/// none is there. For a user other than root it is `/dev/shm`.
///
/// While no process serves a lease, nothing locks its pages in RAM. On `/dev/shm` the kernel can
/// then swap them out, even to the borrower's own device, which waits for this very lender.
///
/// # Errors
/// If another user could change the directory, or the kernel refuses.
pub fn stores() -> Result<&'static Path, StoreError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Path::new("/dev/shm"));
    }
    mount_once(Path::new(STORES))?;
    Ok(Path::new(STORES))
}

/// Mounts a tmpfs at the default directory if `path` is in it.
pub(crate) fn for_store(path: &Path) -> Result<(), StoreError> {
    if path.starts_with(STORES) {
        stores()?;
    }
    Ok(())
}

/// Warns root if the kernel can swap out this tmpfs: root can choose another directory. For
/// `/dev/shm/aquifer` the mount itself warns.
pub(crate) fn warn_of_swap(directory: &Path) {
    let chosen = rustix::process::geteuid().is_root() && !directory.starts_with(STORES);
    if chosen && fs::metadata(directory).is_ok_and(|it| can_be_swapped_out(it.dev())) {
        tracing::warn!(
            "the kernel can swap out {} while no process serves it; choose a directory below \
             {STORES}, or mount a tmpfs there with 'noswap'",
            directory.display()
        );
    }
}

/// Returns whether the kernel can swap out the tmpfs with this device number.
fn can_be_swapped_out(device: u64) -> bool {
    options_of(device).is_some_and(|options| options.split(',').all(|option| option != "noswap"))
}

/// Returns whether the kernel may keep files of the tmpfs with this device number in huge pages.
pub fn may_have_huge_pages(device: u64) -> bool {
    let allows = |option: &str| option.starts_with("huge=") && option != "huge=never";
    fs::read_to_string(HUGE_PAGES).is_ok_and(|setting| setting.contains("[force]"))
        || options_of(device).is_none_or(|options| options.split(',').any(allows))
}

/// Returns the options of the tmpfs with this device number in mountinfo.
fn options_of(device: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let is_it = |mount: &&str| mount.split(' ').nth(2) == Some(number.as_str());
    mounts.lines().find(is_it).and_then(|mount| mount.rsplit(' ').next()).map(str::to_owned)
}

fn mount_once(stores: &Path) -> Result<(), StoreError> {
    guarded::open(stores)?;
    let what = || StoreError::file("mount a tmpfs at", stores);
    let held = File::open(stores).map_err(what())?;
    // The lock lets only one of several processes mount it.
    held.lock().map_err(what())?;
    if is_mounted(stores).map_err(what())? {
        return Ok(());
    }
    if fs::read_dir(stores).map_err(what())?.next().is_some() {
        tracing::warn!(
            "{} is not a separate tmpfs, as it holds older files: the kernel may swap out pages \
             there while no process serves them; once it is empty, the next start mounts a tmpfs",
            stores.display()
        );
        return Ok(());
    }
    match mount("aquifer-pages", stores, "80%", false) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let stores = stores.display();
            tracing::warn!(
                "cannot mount a tmpfs at {stores} ({error}): the kernel may swap out pages there"
            );
            Ok(())
        }
        done => done.map_err(what()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use rustix::mount::{UnmountFlags, unmount};

    use super::*;

    /// Returns the options of all mounts at a directory.
    fn mounts(directory: &Path) -> Vec<String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at = directory.to_str().unwrap();
        mounts
            .lines()
            .filter(|line| line.split(' ').nth(4) == Some(at))
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn no_lent_page_is_swapped_out_while_nobody_serves_it() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let parent = tempfile::tempdir().unwrap();
        let [stores, used] = ["stores", "used"].map(|name| parent.path().join(name));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| mount_once(&stores).unwrap());
            }
        });
        let mounted = mounts(&stores);
        fs::create_dir_all(used.join("host")).unwrap();
        mount_once(&used).unwrap();
        let hidden = mounts(&used);
        let [own, other] =
            [&stores, Path::new("/dev/shm")].map(|it| fs::metadata(it).unwrap().dev());
        let can_be = [own, other].map(can_be_swapped_out);
        unmount(&stores, UnmountFlags::NOFOLLOW).unwrap();
        assert!(mounted.len() == 1 && mounted[0].ends_with("noswap"), "{mounted:?}");
        assert_eq!(can_be, [false, true]);
        assert_eq!(hidden, [] as [String; 0], "what is there stays to be seen");
    }
}
