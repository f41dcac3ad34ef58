//! The volume process: one a volume, and the only one on the swap path.
//!
//! [`client::spawn`] starts it from any program, by running it again under a hidden subcommand ([`SUBCOMMAND`]) that calls
//! [`run()`]. It outlives its starter; who comes later finds it by its files in the state directory:
//!
//! | `volumes/ID.json` | what it serves ([`VolumeRecord`]); locked while it lives, so that a dead one is told from a slow one |
//! |---|---|
//! | `volumes/ID.sock` | its control socket ([`message`]) |
//! | `volumes/ID.log` | what it has to say; gone with an orderly end, and else kept for the last few volumes |

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

/// Why a volume could not be served, reached or taken away.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A file of the state directory, the program or the host's certificate.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, naming the file.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The host's certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] aquifer_fabric::tls::TlsError),
    /// The volume itself.
    #[error(transparent)]
    Pool(#[from] aquifer_pool::PoolError),
    /// Its block device.
    #[error(transparent)]
    Device(#[from] crate::DeviceError),
    /// Swap on it.
    #[error(transparent)]
    Swap(#[from] crate::swap::SwapError),
    /// The volume process answered that it failed; its words.
    #[error("{0}")]
    Refused(String),
    /// Nobody serves this volume.
    #[error("no process serves volume {0}; 'aquifer status' shows those that are served")]
    NotServed(aquifer_page::VolumeId),
    /// It is served already.
    #[error("volume {0} is served by another process already; detach it first")]
    Served(aquifer_page::VolumeId),
    /// What a dead process left could not be removed.
    #[error("volume {volume} is not quite gone: {why}")]
    Left {
        /// The volume.
        volume: aquifer_page::VolumeId,
        /// What is left, and the way out.
        why: String,
    },
    /// The process said something that is not of its protocol, or nothing in time.
    #[error("the process of volume {volume} {why}; its log is {log}", log = .log.display())]
    Silent {
        /// The volume.
        volume: aquifer_page::VolumeId,
        /// What it did.
        why: String,
        /// Where it says more.
        log: std::path::PathBuf,
    },
}

impl ProcessError {
    /// Turns an I/O error of the step `what` into a [`ProcessError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
