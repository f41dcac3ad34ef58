//! The error type of regions.

use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, RegionName};
use aquifer_volume::VolumeError;

/// An error of creating, serving or changing a region.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A file, a program or the host's certificate failed.
    #[error("{what}: {source}")]
    Io {
        /// The step that failed, with the file or process.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The region's volume failed.
    #[error(transparent)]
    Pool(#[from] VolumeError),
    /// The host's certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] aquifer_transport::tls::TlsError),
    /// A region of this name exists.
    #[error(
        "a region '{0}' already exists; choose another name, or run 'aquifer region rm {0}' first"
    )]
    Exists(RegionName),
    /// No region of this name exists.
    #[error("there is no region '{0}'; 'aquifer region list' shows the existing regions")]
    Unknown(RegionName),
    /// No engine serves the region.
    #[error(
        "no engine serves region '{name}'; start one with 'aquifer region recover {name}'; \
         its log is {log}",
        log = .log.display()
    )]
    Unserved {
        /// The region.
        name: RegionName,
        /// The log of its engines.
        log: PathBuf,
    },
    /// Programs have the region mapped.
    #[error("region '{name}' is in use by {programs}; end these programs first")]
    InUse {
        /// The region.
        name: RegionName,
        /// The names of the programs.
        programs: String,
    },
    /// A program has memory pinned.
    #[error(
        "{program} has {pinned} of memory pinned (io_uring fixed buffers, RDMA); a device could \
         write to evicted pages, so no page can leave the cache; unpin the memory, or make the \
         cache as large as the region"
    )]
    Pinned {
        /// The program's name.
        program: String,
        /// The size of its pinned memory.
        pinned: Bytes,
    },
    /// The page was only in the region's file, and another process has removed it there.
    #[error(
        "page {0} is lost: it was only in the region's file, and another process removed it; \
         the program that touched it waits; end the program, or discard the page"
    )]
    Lost(u64),
    /// The engine answered with this error.
    #[error("{0}")]
    Refused(String),
    /// The request is invalid.
    #[error("{0}")]
    Misuse(String),
}

impl RegionError {
    /// Returns a function that turns an I/O error of the step `what` into a [`RegionError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
