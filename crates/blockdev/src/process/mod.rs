//! The volume process: one per volume, and the only process on the swap path.
//!
//! [`client::spawn`] starts it from any program, by running that program again with a hidden
//! subcommand ([`SUBCOMMAND`]) that calls [`run()`]. The volume process outlives its starter. Other
//! programs find it by its files in the state directory:
//!
//! | `volumes/ID.json` | record of the volume ([`VolumeRecord`]), locked while the process lives |
//! |---|---|
//! | `volumes/ID.sock` | its control socket ([`message`]) |
//! | `volumes/ID.log` | its log, removed by an orderly end; otherwise kept for the latest volumes |

mod clean_up;
pub mod client;
mod control;
mod disk;
pub mod message;
mod run;
mod serving;
mod spec;
mod swap_off;

pub use self::run::run;
pub use self::spec::{Files, SUBCOMMAND, VolumeRecord, VolumeSpec};

/// The reason why a volume could not be served, reached or detached.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A system call failed, on a file of the state directory, the program or the host's
    /// certificate.
    #[error("{what}: {source}")]
    Io {
        /// The step, with the file.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The host's certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] aquifer_transport::tls::TlsError),
    /// The volume failed.
    #[error(transparent)]
    Volume(#[from] aquifer_volume::VolumeError),
    /// The block device failed.
    #[error(transparent)]
    Device(#[from] crate::DeviceError),
    /// Swap on the device failed.
    #[error(transparent)]
    Swap(#[from] crate::swap::SwapError),
    /// The volume process reported a failure, in these words.
    #[error("{0}")]
    Refused(String),
    /// No process serves this volume.
    #[error("no process serves volume {0}; 'aquifer status' lists the served volumes")]
    NotServed(aquifer_page::VolumeId),
    /// Another process serves this volume.
    #[error("another process already serves volume {0}; detach it first")]
    Served(aquifer_page::VolumeId),
    /// The leftovers of a dead process could not be removed.
    #[error("cannot clean up volume {volume}: {why}")]
    Left {
        /// The volume.
        volume: aquifer_page::VolumeId,
        /// The part that is left, and the remedy.
        why: String,
    },
    /// The process violated the protocol, ended, or did not answer in time.
    #[error("the process of volume {volume} {why}; its log is {log}", log = .log.display())]
    Silent {
        /// The volume.
        volume: aquifer_page::VolumeId,
        /// The failure of the process, as a verb phrase.
        why: String,
        /// Path of the process's log.
        log: std::path::PathBuf,
    },
}

impl ProcessError {
    /// Turns an I/O error of the step `what` into a [`ProcessError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
