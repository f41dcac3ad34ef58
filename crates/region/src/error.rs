//! The error type of regions.

use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, RegionName};
use aquifer_volume::PoolError;

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
    Pool(#[from] PoolError),
    /// The host's certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] aquifer_fabric::tls::TlsError),
    /// A region of this name exists.
    #[error(
        "there is a region '{0}' already: choose another name, or 'aquifer region rm {0}' first"
    )]
    Exists(RegionName),
    /// No region of this name exists.
    #[error("there is no region '{0}': 'aquifer region list' shows those that there are")]
    Unknown(RegionName),
    /// No engine serves the region.
    #[error("region '{name}' is there but nothing serves it: 'aquifer region start {name}' does; its log is {log}", log = .log.display())]
    Unserved {
        /// The region.
        name: RegionName,
        /// The log of its engines.
        log: PathBuf,
    },
    /// Programs have the region mapped.
    #[error("region '{name}' is in use by {programs}; end that first")]
    InUse {
        /// The region.
        name: RegionName,
        /// The names of the programs.
        programs: String,
    },
    /// A program has memory pinned.
    #[error(
        "{program} has {pinned} of memory pinned (fixed buffers of io_uring, RDMA): no page can leave \
         the cache, as a device could still write to it; have the program unpin it, or give the region \
         a cache of its own size"
    )]
    Pinned {
        /// The program's name.
        program: String,
        /// The size of its pinned memory.
        pinned: Bytes,
    },
    /// The page was only in the region's file, and another process has removed it there.
    #[error(
        "page {0} is lost: it was only in the region's file, from which somebody else has taken it; \
         its program waits for it: end that, or discard the page"
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
