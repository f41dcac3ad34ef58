use std::fmt;
use std::io;

/// Why the kernel's end of NVMe over Fabrics could not be set up or taken down, and the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeError {
    /// What was refused and why, as far as the kernel tells.
    pub why: String,
    /// What to do about it, where that is known.
    pub help: Option<String>,
}

impl NvmeError {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), help: None }
    }

    pub(crate) fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// Turns an I/O error of the step `what` into one of these.
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
