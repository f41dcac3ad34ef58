//! The error of operations on the kernel's NVMe over Fabrics initiator and target.

use std::fmt;
use std::io;

/// The reason why a connection or a target could not be set up or removed, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeError {
    /// The failed step and the reason, as far as the kernel tells it.
    pub why: String,
    /// The remedy, if it is known.
    pub help: Option<String>,
}

impl NvmeError {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), help: None }
    }

    pub(crate) fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// Turns an I/O error of the step `what` into an [`NvmeError`].
    pub(crate) fn io(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Self {
        move |error| {
            let failed = Self::new(format!("{what}: {error}"));
            match error.kind() {
                io::ErrorKind::PermissionDenied => failed.help("run as root"),
                _ => failed,
            }
        }
    }
}

impl fmt::Display for NvmeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.why)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, "; {help}"))
    }
}

impl std::error::Error for NvmeError {}
