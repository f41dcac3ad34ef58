//! The NVMe/TCP initiator: blocking, each I/O queue used by one thread at a time, with many
//! commands in flight.
//!
//! A [`Session`] stands for one namespace. The session's first [`Connection`] makes a controller.
//! Each further connection, for a thread of its own, is one more I/O queue of that controller. The
//! admin queue belongs to a thread that sleeps. That thread sends a Keep Alive every ten seconds, a
//! third of the default keep alive timeout. Otherwise the thread wakes only when the target closes
//! the connection. Traffic on I/O queues does not replace the Keep Alive, as not all controllers
//! count it.
//!
//! A controller ends as a whole. If the admin queue breaks or gets no answer, or any I/O queue
//! breaks, the initiator shuts down all the controller's connections. The next thread that connects
//! makes a new controller.
//!
//! After [`Connection::connect`] nothing allocates unless it fails: every page that a borrower
//! swaps passes here.
//!
//! The files follow a connection. `session` finds or makes a `controller`; `connect` makes a
//! connection one of its queues. `execute` carries out single commands for that, and `authenticate`
//! the authentication that a target demands. `introduce` names the owner, `facts` reads the
//! controller's properties, `keep_alive` keeps the controller alive. `link` sends and receives
//! PDUs, which begin with `head`s, and `transmission` moves blocks. `bytes` takes any range of
//! bytes.

mod authenticate;
mod bytes;
mod connect;
mod controller;
mod error;
mod execute;
mod facts;
mod head;
mod introduce;
mod keep_alive;
mod link;
mod session;
mod target;
mod transmission;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::{Bytes, Incarnation};
use aquifer_transport::initiating::{Late, Pipelined, WINDOW};

pub use aquifer_transport::initiating::Operation;
pub use bytes::ByteSession;
pub use error::{Failure, NvmeError};
pub use session::Session;
pub use target::Target;

use crate::proto::command::DsmRange;
use crate::proto::identify::controller as optional;
use controller::Controller;
use head::Head;
use link::Link;

/// An I/O queue of a controller.
///
/// After an error that [`ends the connection`](NvmeError::ends_connection) every further call
/// fails; drop the connection and connect anew. Offsets and lengths are in bytes, and multiples of
/// [`block`](Self::block).
pub struct Connection {
    link: Link,
    late: Late<Failure>,
    /// One for each command in flight.
    heads: Box<[Head]>,
    target: Arc<Target>,
    controller: Arc<Controller>,
    number: u16,
    io_timeout: Duration,
    next_id: u16,
    broken: bool,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("target", &self.target)
            .field("queue", &self.number)
            .field("facts", &self.controller.facts)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects with a controller of its own.
    ///
    /// # Errors
    /// As [`Session::connect`].
    pub fn connect(target: Arc<Target>, io_timeout: Duration) -> Result<Self, NvmeError> {
        Session::new(target).connect(io_timeout)
    }

    fn new(
        target: Arc<Target>,
        controller: Arc<Controller>,
        link: Link,
        number: u16,
        io_timeout: Duration,
    ) -> Self {
        let heads = (0..WINDOW).map(|_| Head::EMPTY).collect();
        let late = Late::default();
        let (next_id, broken) = (0, false);
        Self { link, late, heads, target, controller, number, io_timeout, next_id, broken }
    }

    /// Returns the connection's target, with the namespace.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the epoch of the visitor for which the controller was made; 0 without a visitor.
    pub fn epoch(&self) -> u64 {
        self.controller.epoch
    }

    /// Returns the UUID or NGUID of the namespace, which identifies the life of its blocks, if it
    /// has one.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.controller.facts.incarnation
    }

    /// Returns the size of the namespace.
    pub fn size(&self) -> Bytes {
        Bytes(self.controller.facts.size)
    }

    /// Returns the size of a block: 512 to 4096 bytes.
    pub fn block(&self) -> Bytes {
        Bytes(self.controller.facts.block())
    }

    /// Returns whether the controller can deallocate blocks, so that [`trim`](Self::trim) works.
    pub fn can_trim(&self) -> bool {
        let facts = &self.controller.facts;
        facts.can(optional::DATASET_MANAGEMENT)
            && facts.limits.in_capsule >= size_of::<DsmRange>() as u64
    }

    /// Returns whether [`write_zeroes`](Self::write_zeroes) works.
    pub fn can_write_zeroes(&self) -> bool {
        self.controller.facts.can(optional::WRITE_ZEROES)
    }

    /// Returns whether [`flush`](Self::flush) has an effect: the target has a volatile write cache.
    pub fn can_flush(&self) -> bool {
        self.controller.facts.write_cache
    }

    /// Returns whether the namespace is write protected.
    pub fn is_read_only(&self) -> bool {
        self.controller.facts.read_only
    }

    /// Returns the longest read or write of a single command.
    pub fn max_transfer(&self) -> Bytes {
        Bytes(self.controller.facts.limits.transfer)
    }

    /// Returns whether no block was allocated, and all read as zeroes, when the controller was
    /// made.
    pub fn was_empty(&self) -> bool {
        self.controller.facts.empty
    }

    /// Sets the timeout of an operation, for all its commands and their answers together.
    pub fn set_io_timeout(&mut self, io_timeout: Duration) {
        self.io_timeout = io_timeout;
    }

    /// Reads all of `into`, with as many commands in flight as the queue allows.
    ///
    /// # Errors
    /// [`NvmeError`]; the contents of `into` are then unspecified.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), NvmeError> {
        self.read_in_pieces(offset, into, self.controller.facts.limits.transfer as usize)
    }

    /// Writes all of `from`, with as many commands in flight as the queue allows.
    ///
    /// # Errors
    /// [`NvmeError`]; any part of the data may then have been written.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), NvmeError> {
        self.write_in_pieces(offset, from, self.controller.facts.limits.transfer as usize)
    }

    /// Deallocates a range. The target chooses its content afterwards.
    ///
    /// # Errors
    /// [`NvmeError`].
    pub fn trim(&mut self, offset: u64, length: u32) -> Result<(), NvmeError> {
        self.run(&mut [Operation::Trim { offset, length }])
    }

    /// Makes a range read as zeroes, and deallocates it where the target can.
    ///
    /// # Errors
    /// [`NvmeError`].
    pub fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<(), NvmeError> {
        let longest = self.controller.facts.limits.zeroes;
        let end = offset + u64::from(length);
        let pieces = (offset..end).step_by(longest as usize).map(|offset| {
            // Fits 32 bits: no longer than `length`.
            Operation::WriteZeroes { offset, length: longest.min(end - offset) as u32 }
        });
        self.run_all(pieces)
    }

    /// Makes acknowledged writes permanent, as far as the target can.
    ///
    /// # Errors
    /// [`NvmeError`].
    pub fn flush(&mut self) -> Result<(), NvmeError> {
        self.run(&mut [Operation::Flush])
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.broken && self.controller.is_alive() {
            self.link.part();
        }
        self.controller.leave(self.number);
    }
}
