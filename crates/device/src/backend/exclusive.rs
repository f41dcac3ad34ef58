//! Whether anybody holds a block device.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::DeviceError;

/// Opens a device that is about to be taken away; refused with [`DeviceError::Busy`] while swap or a mount, or a
/// program that wants it for itself, holds it. While what this returns is open, none of them can.
pub(crate) fn open(path: &Path) -> Result<File, DeviceError> {
    match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path) {
        Ok(file) => Ok(file),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(busy(path)),
        Err(error) => {
            Err(DeviceError::failed(format!("cannot open {} for detaching", path.display()))(error))
        }
    }
}

pub(crate) fn busy(path: &Path) -> DeviceError {
    DeviceError::Busy {
        device: path.to_owned(),
        why: "a mount, swap or program holds it; unmount it, or see 'fuser -v' and 'swapon --show'"
            .to_owned(),
    }
}
