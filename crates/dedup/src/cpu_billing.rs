//! The payer of a group's scanner: the group itself, or one that has borrowed its savings
//! (\[Kim14\], section 7.1). The balancer writes it to a file of the group, and the scanner reads
//! it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::Group;
use aquifer_region::process::{GroupFiles, record};
use serde::{Deserialize, Serialize};

/// Another group that pays for a scanner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuBilling {
    /// The paying group.
    pub group: Group,
    /// The cgroup to which its CPU time is charged.
    pub cgroup: Option<PathBuf>,
}

/// Reads the payer of the scanner of `group`; `None` if it is the group itself.
///
/// # Errors
/// If the file cannot be read.
pub fn read(directory: &Path, group: &Group) -> io::Result<Option<CpuBilling>> {
    record::read(&GroupFiles::new(directory, group).cpu_billing())
}

/// Sets the payer of the scanner of `group`; `None` for the group itself.
///
/// # Errors
/// If the file cannot be written or removed.
pub fn write(directory: &Path, group: &Group, billing: Option<&CpuBilling>) -> io::Result<()> {
    let path = GroupFiles::new(directory, group).cpu_billing();
    match billing {
        Some(billing) => record::write(&path, billing),
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}
