use std::io;
use std::path::PathBuf;

use crate::backend::BackendKind;

/// Why a block device could not be made, used or taken away.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel does not offer this backend.
    #[error("cannot make a block device here ({kind}): {why}")]
    Unavailable {
        /// The backend asked for.
        kind: BackendKind,
        /// What is missing and how to get it.
        why: String,
    },
    /// A step failed.
    #[error("{what}: {source}")]
    Failed {
        /// The step, naming the device or file.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Somebody still uses the device.
    #[error("{} is in use: {why}", .device.display())]
    Busy {
        /// The device.
        device: PathBuf,
        /// By whom, as far as known, and the way out.
        why: String,
    },
}

impl DeviceError {
    /// Turns an I/O error of the step `what` into a [`DeviceError::Failed`].
    pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Failed { what: what.into(), source }
    }
}
