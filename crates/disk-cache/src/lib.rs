//! A cache of the disks of a group's VMs, in memory that is unneeded now (\[Kim14\], section
//! 4.2.3).
//!
//! Memory that sharing saves and no VM was given caches disk pages, which guests may read again
//! after they evicted them. All cached pages are clean, so the cache can give them up at any
//! moment, and does before a VM loses memory. VMs reach their disks through the cache, by NBD over
//! a unix socket. The VMs' writes go through to the disk, so the cache may even be killed: a guest
//! waits for the next one.
//!
//! Each group has one process ([`Service`]). The balancer of memory calls [`status`] and
//! [`resize`].
//!
//! Caches of one group on several hosts lend each other memory (section 8.2, "remote group swap": a
//! VM swaps to a cached disk). A page evicted from one goes to another that has room, and is read
//! from there rather than from the disk.
//!
//! The files: `service` has the sockets, and `control` serves one of them. `disk_registry` opens
//! disks for the NBD clients. `disk` reads and writes a disk through `pages`, which holds all
//! cached memory, and `file`, which bypasses the kernel's page cache. `lender` is a cache on
//! another host, and `remote_export` holds the pages of such borrowers here.

mod control;
mod disk;
mod disk_registry;
mod file;
mod lender;
mod pages;
mod remote_export;
mod service;
mod sys;

use std::io;
use std::path::PathBuf;

use aquifer_nbd::client::Target;
use aquifer_nbd::server::Security;
use aquifer_page::{Bytes, Group};
use aquifer_region::RegionError;
use aquifer_transport::Address;
use aquifer_transport::serving::ListenError;
use serde::{Deserialize, Serialize};

pub use control::{release, resize, status, status_within};
pub use service::Service;

/// Prefix of the names of read-only exports. Other exports are writable, by one process.
pub const READ_ONLY: &str = "ro:";

/// Prefix of the names of exports for a VM that another host moves here. Until its first write, the
/// disk is neither locked nor cached: the other host may still write to it.
pub const ARRIVING: &str = "arriving:";

/// The options of a cache.
#[derive(Clone, Debug)]
pub struct Options {
    /// Size of its memory, in bytes; may be zero.
    pub size: Bytes,
    /// Whether requests to resize it are ignored.
    pub fixed: bool,
    /// Whether its program ends it once no VM has needed it for some time.
    pub ends_unused: bool,
    /// Addresses at which it lends memory to the group's caches on other hosts.
    pub lends: Vec<(Address, Security)>,
    /// Caches that lend to this one. The names of the exports are ignored.
    pub lenders: Vec<Target>,
    /// Most memory to borrow from each.
    pub borrows: Bytes,
    /// Whether borrowed pages are encrypted, so that lenders cannot read them.
    pub encrypted: bool,
}

impl Default for Options {
    /// Returns the options of a cache of size zero, without lenders and borrowers.
    fn default() -> Self {
        let size = Bytes::ZERO;
        let (lends, lenders) = (Vec::new(), Vec::new());
        Self {
            size,
            fixed: false,
            ends_unused: false,
            lends,
            lenders,
            borrows: Bytes::gib(1),
            encrypted: true,
        }
    }
}

/// An error of a cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// An operation on a file failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process caches the disks of this group.
    #[error(
        "another 'aquifer serve disk-cache' caches the disks of group '{0}' already: stop it first"
    )]
    Busy(Group),
    /// The directory of the sockets cannot be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A server cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The cache answered with this error.
    #[error("{0}")]
    Refused(String),
}

/// The status of a cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// The group.
    pub group: Group,
    /// Size of its memory, used or not.
    pub size: Bytes,
    /// Whether requests to resize it are ignored.
    pub fixed: bool,
    /// Whether it ends once no VM has needed it for some time.
    #[serde(default)]
    pub ends_unused: bool,
    /// Memory that holds pages.
    pub used: Bytes,
    /// What its clients have done.
    #[serde(flatten)]
    pub counts: CacheCounts,
    /// The open disks.
    pub disks: Vec<DiskStatus>,
    /// Addresses at which it lends.
    pub lends: Vec<Address>,
    /// The part of `used` that holds pages of borrowers.
    pub lent: Bytes,
    /// The borrowers.
    pub borrowers: Vec<String>,
    /// The lenders.
    pub lenders: Vec<LenderStatus>,
}

/// What a cache's clients have done, since its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheCounts {
    /// Page reads that hit the cache.
    pub hits: u64,
    /// Page reads that missed the cache.
    pub misses: u64,
    /// Bytes that clients have read.
    pub read_bytes: Bytes,
    /// Bytes that clients have written.
    pub written_bytes: Bytes,
}

fn yes() -> bool {
    true
}

/// A borrower's view of a lender. The byte counts are of pages, since the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Address of the lender.
    pub lender: String,
    /// Whether the lender answers.
    pub answers: bool,
    /// Pages that it keeps now, unless it has dropped some.
    pub has: Bytes,
    /// Pages sent there.
    pub sent_bytes: Bytes,
    /// Pages read back with the right content.
    pub read_bytes: Bytes,
    /// Pages that it had dropped when they were read.
    pub dropped_bytes: Bytes,
    /// Pages that it returned with wrong content.
    pub wrong_bytes: Bytes,
}

/// A disk that clients have open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Path of the file, as the first client named it.
    pub path: PathBuf,
    /// Whether the disk is read-only.
    pub read_only: bool,
    /// Whether this cache has locked the disk, and caches its pages. The disk of a VM that moves is
    /// locked on one host at a time. An older cache, which does not say, has locked it.
    #[serde(default = "yes")]
    pub held: bool,
    /// Number of open connections.
    pub connections: u64,
}
