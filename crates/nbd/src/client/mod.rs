//! The NBD initiator: blocking connections, each for one thread at a time, with many requests in
//! flight.
//!
//! Once connected, an operation allocates only if it fails or reports block status. Every page that
//! a borrower swaps takes this path.

mod error;
mod handshake;
mod initiator;
mod operation;
mod transmission;

use std::fmt;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::visitor::Visitor;
use aquifer_page::{Bytes, HostName, Incarnation};
use aquifer_transport::Address;
use aquifer_transport::channel::Channel;
use aquifer_transport::initiating::{Input, Late, Pipelined};
use aquifer_transport::tls;
use zerocopy::IntoBytes;

pub use error::{Failure, NbdError};

pub use aquifer_transport::initiating::{Operation, Run};

use crate::Uri;
use crate::proto::export_flag;

/// An export of a server, and the means to authenticate that server.
#[derive(Clone)]
pub struct Target {
    /// The server's address.
    pub address: Address,
    /// The export's name; empty for the server's default export.
    pub export: String,
    /// This host's TLS configuration and the name that the server must prove; `None` means plain
    /// text.
    pub tls: Option<(tls::Client, HostName)>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

impl fmt::Display for Target {
    /// Writes the target as a URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, export) = (self.address.clone(), self.export.clone());
        Uri { secure: self.tls.is_some(), address, export }.fmt(f)
    }
}

/// The result of the handshake.
#[derive(Clone, Copy, Debug)]
struct Agreement {
    size: u64,
    flags: u16,
    /// The longest payload of a read or write, in bytes.
    max_payload: u32,
    structured: bool,
    /// The id of `base:allocation` if the server reports holes.
    allocation: Option<u32>,
    /// The incarnation of the pages if the server reports it.
    incarnation: Option<Incarnation>,
    /// The epoch of the visitor; 0 without one.
    epoch: u64,
}

/// A connection to one export, after the handshake.
///
/// After an error that [`ends the connection`](NbdError::ends_connection) every further call fails.
/// The caller drops the connection and connects anew.
pub struct Connection {
    channel: Box<dyn Channel>,
    input: Input,
    late: Late<Failure>,
    target: Arc<Target>,
    agreement: Agreement,
    io_timeout: Duration,
    next_cookie: u64,
    broken: bool,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("target", &self.target)
            .field("agreement", &self.agreement)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects and completes the handshake within `io_timeout`, which then also limits each
    /// operation.
    ///
    /// # Errors
    /// The server is unreachable, fails to authenticate, or does not serve the export to this host.
    pub fn connect(target: Arc<Target>, io_timeout: Duration) -> Result<Self, NbdError> {
        Self::connect_as(target, None, io_timeout)
    }

    /// Connects as [`connect`](Self::connect) does, and claims the export for `visitor`.
    ///
    /// Once the server admits the visitor, it executes no further request from connections of an
    /// earlier epoch of this visitor.
    ///
    /// # Errors
    /// As `connect`, and [`Failure::Claimed`] if the export belongs to another owner.
    pub fn connect_as(
        target: Arc<Target>,
        visitor: Option<&Visitor>,
        io_timeout: Duration,
    ) -> Result<Self, NbdError> {
        match handshake::connect(&target, visitor, io_timeout) {
            Ok((channel, agreement)) => Ok(Self::new(channel, target, agreement, io_timeout)),
            Err(failure) => Err(NbdError::new(&target, failure)),
        }
    }

    /// Performs the handshake as [`connect`](Self::connect) does, over a connected channel and
    /// without TLS.
    ///
    /// For fuzzing, where sockets would take most of the time.
    #[doc(hidden)]
    pub fn over(
        mut channel: Box<dyn Channel>,
        target: Arc<Target>,
        io_timeout: Duration,
    ) -> Result<Self, NbdError> {
        match handshake::over(&mut *channel, &target.export, io_timeout) {
            Ok(agreement) => Ok(Self::new(channel, target, agreement, io_timeout)),
            Err(failure) => Err(NbdError::new(&target, failure)),
        }
    }

    fn new(
        channel: Box<dyn Channel>,
        target: Arc<Target>,
        agreement: Agreement,
        io_timeout: Duration,
    ) -> Self {
        let (input, late) = (Input::default(), Late::default());
        let (next_cookie, broken) = (0, false);
        Self { channel, input, late, target, agreement, io_timeout, next_cookie, broken }
    }

    /// Returns the export that this connection reaches.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the incarnation of the export's pages, if this client introduced itself and the
    /// server reports it.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.agreement.incarnation
    }

    /// Returns the size of the export.
    pub fn size(&self) -> Bytes {
        Bytes(self.agreement.size)
    }

    /// Returns whether the server supports [`trim`](Self::trim).
    pub fn can_trim(&self) -> bool {
        self.can(export_flag::SEND_TRIM)
    }

    /// Returns whether the server supports [`write_zeroes`](Self::write_zeroes).
    pub fn can_write_zeroes(&self) -> bool {
        self.can(export_flag::SEND_WRITE_ZEROES)
    }

    /// Returns whether the server supports [`flush`](Self::flush).
    pub fn can_flush(&self) -> bool {
        self.can(export_flag::SEND_FLUSH)
    }

    /// Returns whether several connections see one consistent export.
    pub fn can_multi_conn(&self) -> bool {
        self.can(export_flag::CAN_MULTI_CONN)
    }

    /// Returns whether the server refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.can(export_flag::READ_ONLY)
    }

    /// Returns whether the server supports [`block_status`](Self::block_status).
    pub fn knows_holes(&self) -> bool {
        self.agreement.allocation.is_some()
    }

    /// Returns the longest read or write that the server takes in one request.
    pub fn max_payload(&self) -> Bytes {
        Bytes(self.agreement.max_payload.into())
    }

    /// Sets the timeout of an operation, which covers all its requests and replies together.
    pub fn set_io_timeout(&mut self, io_timeout: Duration) {
        self.io_timeout = io_timeout;
    }

    fn can(&self, flag: u16) -> bool {
        self.agreement.flags & flag != 0
    }

    /// Reads `into.len()` bytes from `offset`, split into requests that the server takes.
    ///
    /// # Errors
    /// [`NbdError`]; the content of `into` is then unspecified.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), NbdError> {
        self.read_in_pieces(offset, into, self.agreement.max_payload as usize)
    }

    /// Writes `from` at `offset`, split into requests that the server takes.
    ///
    /// # Errors
    /// [`NbdError`]; the server may then have written any part of the range.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), NbdError> {
        self.write_in_pieces(offset, from, self.agreement.max_payload as usize)
    }

    /// Releases the space of a range.
    ///
    /// A lender's range then reads as zeroes; other servers may return anything.
    ///
    /// # Errors
    /// [`NbdError`] if the server fails or does not support trim.
    pub fn trim(&mut self, offset: u64, length: u32) -> Result<(), NbdError> {
        self.run(&mut [Operation::Trim { offset, length }])
    }

    /// Makes a range read as zeroes, and releases its space if the server can.
    ///
    /// # Errors
    /// [`NbdError`] if the server fails or does not support the command.
    pub fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<(), NbdError> {
        self.run(&mut [Operation::WriteZeroes { offset, length }])
    }

    /// Makes all acknowledged writes as permanent as the server can.
    ///
    /// # Errors
    /// [`NbdError`] if the server fails or does not support the command.
    pub fn flush(&mut self) -> Result<(), NbdError> {
        self.run(&mut [Operation::Flush])
    }

    /// Appends the runs of data and holes in a range to `runs`; this call may allocate.
    ///
    /// The last run may extend past the range. The runs may also end early: the caller asks again
    /// from there.
    ///
    /// # Errors
    /// [`NbdError`], also if the server does not report holes: see
    /// [`knows_holes`](Self::knows_holes).
    pub fn block_status(
        &mut self,
        offset: u64,
        length: u32,
        runs: &mut Vec<Run>,
    ) -> Result<(), NbdError> {
        self.run(&mut [Operation::BlockStatus { offset, length, runs }])
    }
}

impl Drop for Connection {
    /// Ends the session by `CMD_DISC` (NBD, "Terminating the transmission phase"), if the socket
    /// takes it without waiting.
    fn drop(&mut self) {
        if !self.broken {
            let farewell = operation::farewell();
            // Without `CMD_DISC` the server still sees the connection close.
            let _ = self.channel.try_send(&[IoSlice::new(farewell.as_bytes())]);
            let _ = self.channel.set_abortive(false);
        }
    }
}
