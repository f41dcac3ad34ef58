//! What a borrower needs of a protocol: connections that read and write a lease.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use aquifer_page::visitor::Visitor;
use aquifer_page::{Bytes, Incarnation};

pub use crate::initiating::Operation;

/// The address of a lease, with the means to connect to it. Its text is a URI.
pub trait Connector: fmt::Debug + fmt::Display + Send + Sync {
    /// Connects within `io_timeout`, which then limits each operation, and claims the lease for
    /// `visitor`. Once a lender of ours admits the visitor, it carries out no further request of
    /// the visitor's earlier epochs.
    ///
    /// # Errors
    /// [`InitiatorError`] if the lender cannot be reached, or does not serve the lease to this
    /// host.
    fn connect(
        &self,
        visitor: Option<&Visitor>,
        io_timeout: Duration,
    ) -> Result<Box<dyn Initiator>, InitiatorError>;
}

/// A connection to a lease, for one thread at a time, which accepts any range of bytes.
///
/// After an error that [ends the connection](InitiatorError::ends_connection) every further call
/// fails. `read`, `read_soon`, `write`, `write_zeroes` and `transfer` are on the page path: they
/// MUST NOT allocate unless they fail.
pub trait Initiator: fmt::Debug + Send {
    /// Returns the visitor's epoch to which the connection belongs, or a newer one; 0 without a
    /// visitor.
    fn epoch(&self) -> u64;

    /// Returns the incarnation of the pages, if the lender tells it.
    fn incarnation(&self) -> Option<Incarnation>;

    /// Returns the size of the lease.
    fn size(&self) -> Bytes;

    /// Returns whether the lender refuses writes.
    fn is_read_only(&self) -> bool;

    /// Returns whether several connections see each other's writes.
    fn can_multi_conn(&self) -> bool;

    /// Returns whether [`flush`](Self::flush) works and has an effect.
    fn can_flush(&self) -> bool;

    /// Returns the longest single read or write that the lender accepts.
    fn longest_transfer(&self) -> Bytes;

    /// Sets the timeout of an operation, for all its requests and answers together.
    fn set_io_timeout(&mut self, io_timeout: Duration);

    /// Returns how many bytes from the start of the range are known to be a hole, so read as
    /// zeroes. May allocate.
    ///
    /// # Errors
    /// [`InitiatorError`].
    fn hole(&mut self, offset: u64, length: u32) -> Result<u64, InitiatorError>;

    /// Reads all of `into`.
    ///
    /// # Errors
    /// [`InitiatorError`]; the content of `into` is then unspecified.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), InitiatorError>;

    /// Reads as [`read`](Self::read) does, unless no answer begins to arrive within the time
    /// `soon`. Then it returns false: the caller may have the bytes from elsewhere, and the next
    /// operation drops the late answer. Without support for this, it waits as `read` does.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_soon(
        &mut self,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, InitiatorError> {
        let _ = soon;
        self.read(offset, into).map(|()| true)
    }

    /// Writes all of `from`.
    ///
    /// # Errors
    /// [`InitiatorError`]; any part may then have been written.
    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), InitiatorError>;

    /// Makes a range read as zeroes, and frees its room if the lender can. Returns false if the
    /// lender refuses; then only [`write`](Self::write) makes zeroes.
    ///
    /// # Errors
    /// [`InitiatorError`], if the connection ends.
    fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<bool, InitiatorError>;

    /// Makes acknowledged writes as permanent as the lender can.
    ///
    /// # Errors
    /// [`InitiatorError`].
    fn flush(&mut self) -> Result<(), InitiatorError>;

    /// Runs reads and writes, many in flight and in any order. None may be longer than
    /// [`longest_transfer`](Self::longest_transfer). May call `meanwhile`, once or more, while the
    /// lender works on requests.
    ///
    /// # Errors
    /// As [`read`](Self::read) and [`write`](Self::write).
    fn transfer(
        &mut self,
        operations: &mut [Operation<'_>],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), InitiatorError>;
}

/// A failure of a connection to a lease.
#[derive(Debug, thiserror::Error)]
#[error("{target}: {failure}")]
pub struct InitiatorError {
    /// The URI of the lease.
    pub target: String,
    /// What follows from the failure.
    pub outcome: Outcome,
    /// The failure in the protocol's words.
    #[source]
    pub failure: Box<dyn Error + Send + Sync>,
}

/// What follows from a failure, for the connection and for the stored pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The lender refused the request; the connection goes on.
    Refused,
    /// The lender has no room for the written data; the connection goes on.
    NoSpace,
    /// The connection is of no further use; a new one may work.
    Ended,
    /// As [`Ended`](Self::Ended), and the lender has no lease of that name.
    Unknown,
    /// As [`Ended`](Self::Ended), and the lease belongs to another owner.
    Claimed,
    /// As [`Ended`](Self::Ended), and the lender lost the pages; a retry cannot change that.
    Forgot,
}

impl Outcome {
    /// Returns whether the connection is of no further use.
    pub(crate) fn ends_connection(self) -> bool {
        !matches!(self, Self::Refused | Self::NoSpace)
    }
}

impl InitiatorError {
    /// Makes the error of a failure at `target`.
    pub fn new(
        target: &(impl fmt::Display + ?Sized),
        outcome: Outcome,
        failure: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { target: target.to_string(), outcome, failure: failure.into() }
    }

    /// Makes the error for a connection that failed earlier, if no new attempt is made.
    pub fn broken(target: &dyn fmt::Display) -> Self {
        Self::new(target, Outcome::Ended, "the connection failed earlier")
    }

    /// Makes the error for pages with another incarnation than `expected`: those that this host
    /// stored are gone.
    pub fn forgot(
        target: &dyn fmt::Display,
        expected: Incarnation,
        found: Option<Incarnation>,
    ) -> Self {
        let found = found.map_or_else(|| "unknown".to_owned(), |found| found.to_string());
        let why = format!(
            "the lender restarted and lost all stored pages (their incarnation is {found}, not \
             {expected})"
        );
        Self::new(target, Outcome::Forgot, why)
    }

    /// Returns whether the connection is of no further use. A new one may work.
    pub fn ends_connection(&self) -> bool {
        self.outcome.ends_connection()
    }

    /// Returns whether the lender reported the stored data as gone, or as another owner's.
    pub fn is_loss(&self) -> bool {
        matches!(self.outcome, Outcome::Unknown | Outcome::Claimed | Outcome::Forgot)
    }
}
