//! The error of this crate's operations on block devices.

use std::io;
use std::path::PathBuf;

use crate::backend::BackendKind;

/// The reason why a block device could not be made, used or detached.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel does not offer this backend.
    #[error("cannot create a block device here ({kind}): {why}")]
    Unavailable {
        /// The requested backend.
        kind: BackendKind,
        /// The missing part and its remedy.
        why: String,
    },
    /// A step failed.
    #[error("{what}: {source}")]
    Failed {
        /// The step, with the device or file.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device is in use.
    #[error("{} is in use: {why}", .device.display())]
    Busy {
        /// The path of the device.
        device: PathBuf,
        /// The user of the device, as far as it is known, and the remedy.
        why: String,
    },
}

impl DeviceError {
    /// Turns an I/O error of the step `what` into a [`DeviceError::Failed`].
    pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Failed { what: what.into(), source }
    }
}
