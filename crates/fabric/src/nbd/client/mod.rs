//! The NBD initiator: blocking, one connection used by one thread at a time, any number of requests in flight.
//!
//! After [`Connection::connect`] nothing allocates unless it fails: this is on the way of every page that a borrower
//! swaps.

mod error;
mod handshake;
mod operation;
mod transmission;

use std::fmt;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, Incarnation};
use aquifer_store::Visitor;
use rustls::ClientConfig;
use zerocopy::IntoBytes;

pub use error::{Failure, NbdError};

pub use crate::initiating::{Operation, Run};

use crate::channel::Channel;
use crate::initiating::{Deadline, Input};
use crate::nbd::proto::export_flag;
use crate::{Address, Uri};

/// An export somewhere, and how to trust who serves it.
#[derive(Clone)]
pub struct Target {
    /// The server.
    pub address: Address,
    /// The export; empty for the server's default one.
    pub export: String,
    /// This host's side of mutual TLS, and the host that the server must prove to be; without it, all is in the clear.
    pub tls: Option<(Arc<ClientConfig>, HostName)>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

impl fmt::Display for Target {
    /// As a URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, export) = (self.address.clone(), self.export.clone());
        Uri { secure: self.tls.is_some(), address, export }.fmt(f)
    }
}

/// What the handshake agreed on.
#[derive(Clone, Copy, Debug)]
struct Agreement {
    size: u64,
    flags: u16,
    /// The longest payload of a read or write.
    max_payload: u32,
    structured: bool,
    /// The id of `base:allocation`, if the server tells about holes.
    allocation: Option<u32>,
    /// The life of the pages, if the server tells.
    incarnation: Option<Incarnation>,
}

/// A connection to one export, past the handshake.
///
/// After an error that [`ends the connection`](NbdError::ends_connection) every further call fails; drop it and connect
/// anew.
pub struct Connection {
    channel: Box<dyn Channel>,
    input: Input,
    target: Arc<Target>,
    agreement: Agreement,
    patience: Duration,
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
    /// Connects and takes the handshake to its end within `patience`, which is from then on the longest that an
    /// operation takes.
    ///
    /// # Errors
    /// When the server cannot be reached, is not who it should be, or does not serve the export to this host.
    pub fn connect(target: Arc<Target>, patience: Duration) -> Result<Self, NbdError> {
        Self::connect_as(target, None, patience)
    }

    /// As [`connect`](Self::connect), as somebody who claims the export. When the server lets it in, nothing that was sent
    /// over connections of an earlier epoch of this visitor is carried out any more.
    ///
    /// # Errors
    /// As `connect`, and [`Failure::Claimed`] where the export is another owner's.
    pub fn connect_as(
        target: Arc<Target>,
        visitor: Option<&Visitor>,
        patience: Duration,
    ) -> Result<Self, NbdError> {
        match handshake::connect(&target, visitor, patience) {
            Ok((channel, agreement)) => Ok(Self::new(channel, target, agreement, patience)),
            Err(failure) => Err(NbdError::new(&target, failure)),
        }
    }

    /// As [`connect`](Self::connect), over a channel that is connected already, in the clear.
    ///
    /// For fuzzing, where sockets would cost most of the time.
    #[doc(hidden)]
    pub fn over(
        mut channel: Box<dyn Channel>,
        target: Arc<Target>,
        patience: Duration,
    ) -> Result<Self, NbdError> {
        match handshake::over(&mut *channel, &target.export, patience) {
            Ok(agreement) => Ok(Self::new(channel, target, agreement, patience)),
            Err(failure) => Err(NbdError::new(&target, failure)),
        }
    }

    fn new(
        channel: Box<dyn Channel>,
        target: Arc<Target>,
        agreement: Agreement,
        patience: Duration,
    ) -> Self {
        let input = Input::new();
        Self { channel, input, target, agreement, patience, next_cookie: 0, broken: false }
    }

    /// What it is connected to.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The life of the export's pages, where this client said who it is and the server is one of ours.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.agreement.incarnation
    }

    /// Size of the export.
    pub fn size(&self) -> Bytes {
        Bytes(self.agreement.size)
    }

    /// Whether the server can give room back: [`trim`](Self::trim) works.
    pub fn can_trim(&self) -> bool {
        self.can(export_flag::SEND_TRIM)
    }

    /// Whether [`write_zeroes`](Self::write_zeroes) works.
    pub fn can_write_zeroes(&self) -> bool {
        self.can(export_flag::SEND_WRITE_ZEROES)
    }

    /// Whether [`flush`](Self::flush) does anything.
    pub fn can_flush(&self) -> bool {
        self.can(export_flag::SEND_FLUSH)
    }

    /// Whether several connections see one consistent export.
    pub fn can_multi_conn(&self) -> bool {
        self.can(export_flag::CAN_MULTI_CONN)
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.can(export_flag::READ_ONLY)
    }

    /// Whether [`block_status`](Self::block_status) works.
    pub fn knows_holes(&self) -> bool {
        self.agreement.allocation.is_some()
    }

    /// The longest read or write that the server takes at once.
    pub fn max_payload(&self) -> Bytes {
        Bytes(self.agreement.max_payload.into())
    }

    /// Changes how long an operation may take, all its requests and replies together.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    fn can(&self, flag: u16) -> bool {
        self.agreement.flags & flag != 0
    }

    /// Reads all of `into`.
    ///
    /// # Errors
    /// [`NbdError`]; the contents of `into` are then unspecified.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), NbdError> {
        let (longest, deadline) =
            (self.agreement.max_payload as usize, Deadline::after(self.patience));
        let mut at = offset;
        for into in into.chunks_mut(longest) {
            let length = into.len() as u64;
            self.run_by(deadline, &mut [Operation::Read { offset: at, into }])?;
            at += length;
        }
        Ok(())
    }

    /// Writes all of `from`.
    ///
    /// # Errors
    /// [`NbdError`]; any part may then have been written.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), NbdError> {
        let (longest, deadline) =
            (self.agreement.max_payload as usize, Deadline::after(self.patience));
        let mut at = offset;
        for from in from.chunks(longest) {
            self.run_by(deadline, &mut [Operation::Write { offset: at, from }])?;
            at += from.len() as u64;
        }
        Ok(())
    }

    /// Gives the room of a range back. What it reads as afterwards is the server's choice; a lender's is zeroes.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn trim(&mut self, offset: u64, length: u32) -> Result<(), NbdError> {
        self.run(&mut [Operation::Trim { offset, length }])
    }

    /// Makes a range read as zeroes, giving its room back where the server can.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<(), NbdError> {
        self.run(&mut [Operation::WriteZeroes { offset, length }])
    }

    /// Makes what was acknowledged permanent, as far as the server can.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn flush(&mut self) -> Result<(), NbdError> {
        self.run(&mut [Operation::Flush])
    }

    /// Appends to `runs` which parts of a range are holes; the last run may reach beyond the range, or the runs may end
    /// before it: then ask again from there. This one may allocate.
    ///
    /// # Errors
    /// [`NbdError`], also where the server does not tell: see [`knows_holes`](Self::knows_holes).
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
    /// Says farewell, as the specification asks, if that can be done without waiting.
    fn drop(&mut self) {
        if !self.broken {
            let farewell = operation::farewell();
            // A server that does not get it sees the connection close all the same.
            let _ = self.channel.try_send(&[IoSlice::new(farewell.as_bytes())]);
            let _ = self.channel.set_abortive(false);
        }
    }
}
