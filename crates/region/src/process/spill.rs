//! The files for pages of regions in a directory on a disk: those that no lender has room for, and
//! second copies.
//!
//! The former are named `region-BOOT-VOLUME`, after the host's boot and the region's volume, and
//! the latter `copy-BOOT-VOLUME-LEASE`. They are removed with their region. After a reboot nothing
//! can read them, as the keys were in the records of regions.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use aquifer_page::{Bytes, LeaseId, VolumeId};
use aquifer_volume::{DiskCopies, SpillFile};

use crate::error::RegionError;

const PREFIX: &str = "region-";
const COPY_PREFIX: &str = "copy-";

/// The share of a file system that stays free for others.
const KEPT_FREE: f64 = 1.0 / 16.0;

/// Others need no more than this of a large file system.
const MOST_KEPT_FREE: Bytes = Bytes::gib(4);

/// Makes an empty spill file for the region of this volume, and its directory.
pub(super) fn make_in(directory: &Path, volume: VolumeId) -> Result<SpillFile, RegionError> {
    let fail = |error| {
        let what = format!("cannot make a spill file in {}", directory.display());
        RegionError::io(what)(error)
    };
    make_directory(directory).map_err(fail)?;
    let path = directory.join(format!("{PREFIX}{}-{volume}", boot().map_err(fail)?));
    // An earlier attempt may have left an empty one.
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(error)),
        _ => {}
    }
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    made.map_err(fail)?;
    Ok(SpillFile::new(path))
}

/// Names the files for second copies of pages of the region of this volume, and makes their
/// directory.
///
/// # Errors
/// The directory cannot be made.
pub fn disk_copies_in(directory: &Path, volume: VolumeId) -> Result<DiskCopies, RegionError> {
    let named = make_directory(directory).and_then(|()| boot());
    let boot = named.map_err(RegionError::io(format!(
        "cannot keep copies of pages in {}",
        directory.display()
    )))?;
    Ok(DiskCopies::new(directory.join(format!("{COPY_PREFIX}{boot}-{volume}"))))
}

fn make_directory(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Checks that the directory's file system has room for so much more, and some for others.
///
/// # Errors
/// [`RegionError::Refused`] says how much room there is.
pub(super) fn has_room(directory: &Path, wanted: Bytes) -> Result<(), RegionError> {
    let what = || format!("cannot tell the room in the spill directory {}", directory.display());
    let system = make_directory(directory)
        .and_then(|()| rustix::fs::statvfs(directory).map_err(io::Error::from))
        .map_err(RegionError::io(what()))?;
    let [all, free] = [system.f_blocks, system.f_bavail]
        .map(|blocks| Bytes(blocks.saturating_mul(system.f_frsize)));
    let kept = kept_free(all);
    if free >= wanted.saturating_add(kept) {
        return Ok(());
    }
    Err(RegionError::Refused(format!(
        "{wanted} cannot go to the spill directory {}: {free} are free there, of which {kept} \
         stay for others; make room there, or let another host lend",
        directory.display()
    )))
}

/// Returns how much of a file system of this size stays free for others.
fn kept_free(all: Bytes) -> Bytes {
    all.scaled(KEPT_FREE).min(MOST_KEPT_FREE)
}

/// Removes the files in a spill directory that regions left when the host went down.
///
/// # Errors
/// The system's. A directory that does not exist is no error.
pub fn remove_old_spill_files(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let now = boot()?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let is_old = name.to_str().and_then(boot_of).is_some_and(|boot| boot != now);
        if is_old && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Returns the boot in the name of a file with pages; `None` for the name of another file.
fn boot_of(name: &str) -> Option<&str> {
    let is_volume = |name: &str| name.parse::<VolumeId>().is_ok();
    let is_copy = |name: &str| {
        let ids = name.split_once('-');
        ids.is_some_and(|(volume, lease)| is_volume(volume) && lease.parse::<LeaseId>().is_ok())
    };
    let (boot, is_ours) = match (name.strip_prefix(PREFIX), name.strip_prefix(COPY_PREFIX)) {
        (Some(rest), _) => rest.split_once('-').map(|(boot, rest)| (boot, is_volume(rest)))?,
        (_, Some(rest)) => rest.split_once('-').map(|(boot, rest)| (boot, is_copy(rest)))?,
        _ => return None,
    };
    let is_boot = boot.len() == 32 && boot.bytes().all(|digit| digit.is_ascii_hexdigit());
    (is_boot && is_ours).then_some(boot)
}

/// Returns the id of the host's boot, without hyphens.
fn boot() -> io::Result<String> {
    let id = aquifer_procfs::read("/proc/sys/kernel/random/boot_id")?;
    Ok(id.trim().replace('-', ""))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn only_spill_files_of_earlier_boots_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let spills = directory.path().join("spills");
        remove_old_spill_files(&spills).unwrap();
        let ours = make_in(&spills, VolumeId::random()).unwrap().path;
        let (boot, volume) = ("0".repeat(32), VolumeId::random());
        let old = spills.join(format!("region-{boot}-{volume}"));
        let copy = spills.join(format!("copy-{boot}-{volume}-{}", LeaseId::random()));
        let others = ["notes", "region-eu.csv", "region-0-1"].map(|name| spills.join(name));
        for path in others.iter().chain([&old, &copy]) {
            fs::write(path, b"x").unwrap();
        }
        remove_old_spill_files(&spills).unwrap();
        assert!(ours.exists() && !old.exists() && !copy.exists());
        assert!(others.iter().all(|path| path.exists()));
    }

    #[test]
    fn a_disk_keeps_some_room_for_others() {
        assert_eq!(kept_free(Bytes::gib(16)), Bytes::gib(1));
        assert_eq!(kept_free(Bytes::gib(4096)), Bytes::gib(4));
        let directory = tempfile::tempdir().unwrap();
        let refused = has_room(directory.path(), Bytes(u64::MAX / 2)).unwrap_err().to_string();
        assert!(refused.contains("stay for others"), "{refused}");
    }
}
