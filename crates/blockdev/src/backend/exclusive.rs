//! An exclusive open, which tells whether a block device is in use.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::DeviceError;

/// Opens a device that is about to be detached.
///
/// While the returned file is open, no swap, mount or exclusive open can take the device.
///
/// # Errors
///
/// Returns [`DeviceError::Busy`] while swap, a mount or an exclusive open of a program holds the
/// device. Returns [`DeviceError::Failed`] if it cannot be opened for another reason.
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
