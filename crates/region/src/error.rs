use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, RegionName};
use aquifer_pool::PoolError;

/// Why a region could not be made, served or changed.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A file, a program or the host's certificate.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, naming the thing.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The region's volume.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The host's certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] aquifer_fabric::tls::TlsError),
    /// There is one of that name.
    #[error(
        "there is a region '{0}' already: choose another name, or 'aquifer region rm {0}' first"
    )]
    Exists(RegionName),
    /// There is none of that name.
    #[error("there is no region '{0}': 'aquifer region list' shows those that there are")]
    Unknown(RegionName),
    /// Nothing serves it.
    #[error("region '{name}' is there but nothing serves it: 'aquifer region start {name}' does; its log is {log}", log = .log.display())]
    Unserved {
        /// The region.
        name: RegionName,
        /// What its engines had to say.
        log: PathBuf,
    },
    /// Programs have it mapped.
    #[error("region '{name}' is in use by {programs}; end that first")]
    InUse {
        /// The region.
        name: RegionName,
        /// Who.
        programs: String,
    },
    /// A program has memory pinned.
    #[error(
        "{program} has {pinned} of memory pinned (fixed buffers of io_uring, RDMA): no page can leave \
         the cache, as a device could still write to it; have the program unpin it, or give the region \
         a cache of its own size"
    )]
    Pinned {
        /// The program.
        program: String,
        /// How much.
        pinned: Bytes,
    },
    /// A page was only in the region's file, and is not there any more.
    #[error(
        "page {0} is lost: it was only in the region's file, from which somebody else has taken it; \
         its program waits for it: end that, or discard the page"
    )]
    Lost(u64),
    /// The engine answered that it failed; its words.
    #[error("{0}")]
    Refused(String),
    /// What was asked makes no sense.
    #[error("{0}")]
    Misuse(String),
}

impl RegionError {
    /// Turns an I/O error of the step `what` into a [`RegionError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
