//! The files for pages of regions that no lender has room for, in a directory on a disk.
//!
//! A file is named `region-BOOT-VOLUME`, after the host's boot and the region's volume. It goes
//! with its region. After a reboot nothing can read it, as the keys were in the records of regions.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use aquifer_page::VolumeId;
use aquifer_volume::SpillFile;

use crate::error::RegionError;

const PREFIX: &str = "region-";

/// Names a new spill file for the region of this volume, and makes its directory.
pub(super) fn file_in(directory: &Path, volume: VolumeId) -> Result<SpillFile, RegionError> {
    let fail = |error| {
        let what = format!("cannot make the directory {} for a spill file", directory.display());
        RegionError::io(what)(error)
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(fail)?;
    let name = format!("{PREFIX}{}-{volume}", boot().map_err(fail)?);
    Ok(SpillFile::new(directory.join(name)))
}

/// Removes the spill files in a directory that regions left when the host went down.
///
/// # Errors
/// The system's. A directory that does not exist is no error.
pub fn remove_old_spill_files(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let now = format!("{PREFIX}{}-", boot()?);
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let is_old =
            name.to_str().is_some_and(|name| name.starts_with(PREFIX) && !name.starts_with(&now));
        if is_old && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
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
        let ours = file_in(&spills, VolumeId::random()).unwrap().path;
        let old = spills.join(format!("region-{}-{}", "0".repeat(32), VolumeId::random()));
        let another = spills.join("notes");
        for path in [&ours, &old, &another] {
            fs::write(path, b"x").unwrap();
        }
        remove_old_spill_files(&spills).unwrap();
        assert_eq!([&ours, &old, &another].map(|path| path.exists()), [true, false, true]);
    }
}
