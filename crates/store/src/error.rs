//! The errors of the store.

use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::export::ExportError;
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};

/// A reason why the store cannot carry out a request.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory is not on a tmpfs: pages on a disk would be slow and would free no RAM.
    #[error(
        "{} is not on a tmpfs, so pages there would not be in RAM; choose a directory under \
         /dev/shm, or mount a tmpfs with mode=700 there",
        .0.display()
    )]
    NotTmpfs(PathBuf),
    /// Another user could create or replace files in the directory.
    #[error(
        "{} {why}: other users could replace the files there; choose another directory, or \
         recreate this one with mode 700",
        .at.display()
    )]
    Unguarded {
        /// The directory, or one of its parents.
        at: PathBuf,
        /// The check that failed.
        why: String,
    },
    /// Another process serves this directory.
    #[error(
        "{} is already served by process {pid}; stop it first, or choose another directory",
        .dir.display()
    )]
    Busy {
        /// The store's directory.
        dir: PathBuf,
        /// The process id in the lock file; empty if this process cannot read it.
        pid: String,
    },
    /// A system call on a file failed.
    #[error("cannot {what} {}: {source}", .path.display())]
    File {
        /// The attempted operation, a verb.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A lease with this id exists.
    #[error("lease {0} exists already")]
    Exists(LeaseId),
    /// No lease has this id.
    #[error("there is no lease {0} here")]
    Unknown(LeaseId),
    /// The capacity is zero or not a multiple of the page size.
    #[error(
        "lease {lease}: a capacity of {capacity} is not a positive multiple of {PAGE_SIZE} bytes"
    )]
    Capacity {
        /// The lease.
        lease: LeaseId,
        /// The requested capacity.
        capacity: Bytes,
    },
    /// The lease cannot carry out the request.
    #[error(transparent)]
    Export(#[from] ExportError),
}

impl StoreError {
    /// Returns a function that wraps an I/O error of the operation `what` on `path`.
    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}
