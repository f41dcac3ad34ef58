use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Pages on a disk would be neither fast nor given back.
    #[error("{} is not on a tmpfs, so what is stored there would not be RAM; choose a directory under /dev/shm, or mount a tmpfs with mode=700 there", .0.display())]
    NotTmpfs(PathBuf),
    /// Somebody else could put files there, or exchange those that are there.
    #[error("{} {why}: others could exchange what is stored there; choose another directory, or remove this one and make it anew, for its owner only", .at.display())]
    Unguarded {
        /// The directory, or one on the way to it.
        at: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another process serves this directory.
    #[error("{} is already served by process {pid}; stop it first, or choose another directory", .dir.display())]
    Busy {
        /// The store's directory.
        dir: PathBuf,
        /// The holder's process id, as it wrote it.
        pid: String,
    },
    /// The system refused something about a file.
    #[error("cannot {what} {}: {source}", .path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// There is a lease with this id already.
    #[error("lease {0} exists already")]
    Exists(LeaseId),
    /// There is no lease with this id.
    #[error("there is no lease {0} here")]
    Unknown(LeaseId),
    /// Pages cannot be cut.
    #[error(
        "lease {lease}: a capacity of {capacity} is not a positive multiple of {PAGE_SIZE} bytes"
    )]
    Capacity {
        /// The lease.
        lease: LeaseId,
        /// What was asked for.
        capacity: Bytes,
    },
    /// The lease stores as much as it may.
    #[error(
        "lease {lease} is full: it stores all of the {quota} it may; discard something or ask for a larger lease"
    )]
    Full {
        /// The lease.
        lease: LeaseId,
        /// Its quota.
        quota: Bytes,
    },
    /// The lender has no page left to give.
    #[error(
        "no memory for lease {lease}: the tmpfs or the memory limit of this process is full ({source})"
    )]
    NoMemory {
        /// The lease.
        lease: LeaseId,
        /// The system's reason.
        source: io::Error,
    },
    /// The request leaves the lease.
    #[error("{length} bytes at {offset} are not inside lease {lease} of {capacity}")]
    Range {
        /// The lease.
        lease: LeaseId,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// The size of the lease.
        capacity: Bytes,
    },
    /// The lease was removed while it was in use.
    #[error("lease {0} has been removed")]
    Gone(LeaseId),
}

impl StoreError {
    /// Makes the [`StoreError::File`] for a failed `what` on `path`.
    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}
