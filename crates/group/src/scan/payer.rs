//! Who pays for a group's scanner: the group itself, or one that has borrowed what it saves (Groups, section 7.1). It stands in a file of the group's,
//! written by who hands out what groups save, and read by the scanner.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::Group;
use aquifer_region::process::{GroupFiles, record};
use serde::{Deserialize, Serialize};

/// Another group that pays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payer {
    /// Which.
    pub group: Group,
    /// The cgroup in which it pays for CPU.
    pub cgroup: Option<PathBuf>,
}

/// Who pays for the scanner of `group`, if not the group itself.
///
/// # Errors
/// The system's.
pub fn read(directory: &Path, group: &Group) -> io::Result<Option<Payer>> {
    record::read(&GroupFiles::new(directory, group).payer())
}

/// Has somebody pay for the scanner of `group` from now on.
///
/// # Errors
/// The system's.
pub fn write(directory: &Path, group: &Group, payer: Option<&Payer>) -> io::Result<()> {
    let path = GroupFiles::new(directory, group).payer();
    match payer {
        Some(payer) => record::write(&path, payer),
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}
