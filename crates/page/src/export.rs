//! What a protocol serves: the pages of a lease, whichever crate holds them.

use std::fmt;
use std::io;

use crate::visitor::{Denied, End, Stay, Visitor};
use crate::{Bytes, Incarnation, LeaseId};

/// The pages of one lease, as the servers of the protocols use them.
///
/// Threads may use any ranges at the same time. No call allocates, except [`admit`](Self::admit).
pub trait Export: fmt::Debug + Send + Sync {
    /// Returns the lease.
    fn id(&self) -> LeaseId;

    /// Returns the incarnation of the pages.
    fn incarnation(&self) -> Incarnation;

    /// Returns the size of the address space.
    fn capacity(&self) -> Bytes;

    /// Returns how much is stored.
    fn stored(&self) -> Bytes;

    /// Admits a visitor's connection once the older connections that it replaces have ended. `end`
    /// is called when this connection must end in turn. The [`Stay`] MUST live until the server
    /// carries out nothing more for the connection.
    ///
    /// # Errors
    /// [`Denied`].
    fn admit(&self, visitor: &Visitor, end: End) -> Result<Stay, Denied>;

    /// Checks whether a request for the range can succeed; does nothing else.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`].
    fn check(&self, offset: u64, length: u64) -> Result<(), ExportError>;

    /// Fills `into` from `offset` on.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), ExportError>;

    /// Stores `from` at `offset`. Pages that become all zero take no RAM.
    ///
    /// # Errors
    /// [`ExportError`], after any part of the range has been written.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), ExportError>;

    /// Zeroes the range and frees its RAM.
    ///
    /// # Errors
    /// [`ExportError`], after any part of the range has been zeroed.
    fn discard(&self, offset: u64, length: u64) -> Result<(), ExportError>;

    /// Zeroes the range and stores all of it, so that later writes to it cannot exceed the quota.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn allocate_zeroes(&self, offset: u64, length: u64) -> Result<(), ExportError>;

    /// Calls `each` for at most `most` runs of stored pages and holes in the range, in order.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    fn runs(
        &self,
        offset: u64,
        length: u64,
        most: usize,
        each: &mut dyn FnMut(Run),
    ) -> Result<(), ExportError>;

    /// Locks the range against writers during one call of `with`, so that a server can send the
    /// bytes without a copy. `with` MUST NOT wait for a client, nor lock or write further ranges.
    ///
    /// # Errors
    /// As [`check`](Self::check), without a call of `with`.
    fn hold(
        &self,
        offset: u64,
        length: u64,
        with: &mut dyn FnMut(&dyn Held),
    ) -> Result<(), ExportError>;
}

/// A range of an export that is locked against writers.
pub trait Held {
    /// Calls `each` for the bytes in order, in as few pieces as possible, none of which is empty.
    fn segments<'a>(&'a self, each: &mut dyn FnMut(Segment<'a>));
}

/// A piece of held bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Bytes in memory.
    Data(&'a [u8]),
    /// Length in bytes of a hole; it reads as zeroes.
    Hole(usize),
}

impl Segment<'_> {
    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no segment is empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Hole(length) => *length,
        }
    }
}

/// A run of an export that is all stored or all hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Length in bytes.
    pub length: u64,
    /// Whether the run takes RAM; a hole reads as zeroes.
    pub stored: bool,
}

/// A reason why an export cannot carry out a request.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The lease stores as much as its quota allows.
    #[error(
        "lease {lease} is full: it stores its whole quota of {quota}; discard pages, or ask for \
         a larger lease"
    )]
    Full {
        /// The lease.
        lease: LeaseId,
        /// Its quota.
        quota: Bytes,
    },
    /// The tmpfs or the process's memory limit is full.
    #[error(
        "no memory for lease {lease}: the tmpfs or the memory limit of this process is full \
         ({source})"
    )]
    NoMemory {
        /// The lease.
        lease: LeaseId,
        /// The system's error.
        source: io::Error,
    },
    /// The request extends beyond the lease.
    #[error("{length} bytes at {offset} are not inside lease {lease} of {capacity}")]
    Range {
        /// The lease.
        lease: LeaseId,
        /// First requested byte.
        offset: u64,
        /// Number of requested bytes.
        length: u64,
        /// The size of the lease.
        capacity: Bytes,
    },
    /// The lease has been removed while a caller still holds it.
    #[error("lease {0} has been removed")]
    Gone(LeaseId),
}
