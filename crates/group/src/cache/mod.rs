//! A cache of the disks of a group's VMs, in memory that nobody needs just now (Groups, section 4.2.3).
//!
//! What sharing has saved and no VM was given keeps what guests have read from their disks, and may read again when they had to let go of it. All of it is
//! clean: it can be taken away at any moment, and is, before a VM loses anything. VMs have their disks through it, by NBD over a unix socket; what they write
//! goes through to the disk. So it can also die: a guest waits for the next one, and finds what it has written.
//!
//! One process a group ([`Service`]). [`status`] and [`resize`] are for others: who divides memory calls them.
//!
//! Caches of one group on several hosts lend each other what they have (section 8.2, "remote group swap": a VM swaps to a disk that is cached): what leaves the
//! memory of one goes to another one, if that has room, and is read from there rather than from the disk.
//!
//! The files: `service` has the sockets, `control` is one of them, `shelf` opens disks for clients of the other, `disk` reads and writes one through
//! `pages`, which is all memory there is, and `file`, which has the kernel keep none beside it. `lender` is a cache on another host, and `lent` what such have here.

mod control;
mod disk;
mod file;
mod lender;
mod lent;
mod pages;
mod service;
mod shelf;

use std::io;
use std::path::PathBuf;

use aquifer_fabric::Address;
use aquifer_fabric::nbd::client::Target;
use aquifer_fabric::nbd::server::{ListenError, Security};
use aquifer_page::{Bytes, Group};
use aquifer_region::RegionError;
use serde::{Deserialize, Serialize};

pub use control::{resize, status};
pub use service::Service;

/// What comes before the path in the name of an export that is only to be read. Others are to be written, by one process.
pub const READ_ONLY: &str = "ro:";

/// What a cache has, from whom, and for whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// What it may have of memory, which may be nothing.
    pub size: Bytes,
    /// It keeps that size, whatever it is asked.
    pub fixed: bool,
    /// Where it lends some of that to caches of the group on other hosts.
    pub lends: Vec<(Address, Security)>,
    /// Caches that lend to this one. The export of each is its own to choose.
    pub lenders: Vec<Target>,
    /// What it may have from each.
    pub borrows: Bytes,
    /// Lenders cannot read what they keep.
    pub sealed: bool,
}

impl Default for Options {
    /// Alone, and of no size but what it is given.
    fn default() -> Self {
        let size = Bytes::ZERO;
        let (lends, lenders) = (Vec::new(), Vec::new());
        Self { size, fixed: false, lends, lenders, borrows: Bytes::gib(1), sealed: true }
    }
}

/// Why there is no cache, or it does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is one.
    #[error("the disks of group '{0}' are cached already, by another 'aquifer group cache'")]
    Busy(Group),
    /// Where its sockets are to be.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Its socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// It answered that it failed; its words.
    #[error("{0}")]
    Refused(String),
}

/// How a cache is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The group.
    pub group: Group,
    /// What it may have of memory.
    pub size: Bytes,
    /// It always may, whatever it is asked.
    pub fixed: bool,
    /// What it has.
    pub used: Bytes,
    /// Pages that were read and there, since it started.
    pub hits: u64,
    /// Pages that were read and not there.
    pub misses: u64,
    /// What clients have read.
    pub read_bytes: Bytes,
    /// What they have written.
    pub written_bytes: Bytes,
    /// The disks that they have.
    pub disks: Vec<DiskStatus>,
    /// Where it lends.
    pub lends: Vec<Address>,
    /// What others have of `used`.
    pub lent: Bytes,
    /// Who they are.
    pub borrowers: Vec<String>,
    /// Who lends to it.
    pub lenders: Vec<LenderStatus>,
}

/// A cache that lends to another one, as that sees it. Bytes are of pages, since it started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Its address.
    pub lender: String,
    /// It is there.
    pub answers: bool,
    /// What it has now, if it has not dropped it.
    pub has: Bytes,
    /// What has come there.
    pub sent_bytes: Bytes,
    /// What was read from there, and was right.
    pub read_bytes: Bytes,
    /// What it had no more when it was asked.
    pub dropped_bytes: Bytes,
    /// What it had changed.
    pub wrong_bytes: Bytes,
}

/// A disk that clients have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// The file, by the name that it was first asked for by.
    pub path: PathBuf,
    /// Nobody writes it.
    pub read_only: bool,
    /// Of clients, now.
    pub connections: u64,
}
