use std::io;
use std::path::PathBuf;

use aquifer_page::RegionName;
use aquifer_region::RegionError;

/// Why a guest could not be started, asked or stopped.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A file or a program.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, naming the thing.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The region that its memory is, or is to be.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// There is one of that name.
    #[error("there is a VM '{0}' already: choose another name, or 'aquifer vm stop {0}' first")]
    Exists(RegionName),
    /// There is none of that name.
    #[error("there is no VM '{0}': 'aquifer vm list' shows those that there are")]
    Unknown(RegionName),
    /// Its QEMU is not there any more.
    #[error("VM '{name}' does not run; its log is {log}", log = .log.display())]
    Ended {
        /// The VM.
        name: RegionName,
        /// What QEMU had to say.
        log: PathBuf,
    },
    /// QEMU did not do what it was asked.
    #[error("QEMU refuses '{command}': {why}")]
    Refused {
        /// What it was asked.
        command: String,
        /// Its words.
        why: String,
    },
    /// QEMU ended before it ran; its words.
    #[error("QEMU does not start: {0}")]
    NotStarted(String),
    /// What the VM's keeper says.
    #[error("{0}")]
    Keeper(String),
    /// The guest goes on running.
    #[error("the guest has not powered itself off within {} s", .0.as_secs())]
    StillRunning(std::time::Duration),
    /// What was asked makes no sense.
    #[error("{0}")]
    Misuse(String),
}

impl GuestError {
    /// Turns an I/O error of the step `what` into a [`GuestError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
