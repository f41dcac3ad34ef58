//! The NVMe/TCP initiator: blocking, one I/O queue used by one thread at a time, many commands in flight on each.
//!
//! A [`Session`] stands for one namespace. Its first [`Connection`] makes a controller; each further one, for a thread of its
//! own, is one more I/O queue of that controller. Its admin queue belongs to a thread that sleeps: it gives a sign of life
//! every ten seconds, a third of the keep alive time-out, and otherwise wakes up only when the target closes the connection:
//! traffic on I/O queues is not asked about, as not all controllers take it for a sign of life.
//! A controller ends as a whole: when its admin queue breaks, or stays without an answer, or any of its I/O queues breaks, all
//! of its connections are shut down, and whoever connects next makes a new controller.
//!
//! After [`Connection::connect`] nothing allocates unless it fails: this is on the way of every page that a borrower
//! swaps.
//!
//! The files follow a connection. `session` finds or makes a `controller`, for which `connect` makes a connection a
//! queue, with `execute` for its commands and `authenticate` where the target asks for that.
//! `introduce` names the owner, `facts` is what the controller tells, `keeper` keeps it alive.
//! `link` sends and receives PDUs, whose beginnings are `head`s, and `transmission` moves blocks.

mod authenticate;
mod connect;
mod controller;
mod error;
mod execute;
mod facts;
mod head;
mod introduce;
mod keeper;
mod link;
mod session;
mod target;
mod transmission;

use std::array;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::{Bytes, Incarnation};

pub use crate::initiating::Operation;
pub use error::{Failure, NvmeError};
pub use session::Session;
pub use target::Target;

use crate::initiating::{Deadline, WINDOW};
use crate::nvme::proto::command::DsmRange;
use crate::nvme::proto::identify::controller as optional;
use controller::Controller;
use head::Head;
use link::Link;

/// An I/O queue of a controller.
///
/// After an error that [`ends the connection`](NvmeError::ends_connection) every further call fails; drop it and connect
/// anew. Offsets and lengths are in bytes, and those of whole [`blocks`](Self::block).
pub struct Connection {
    link: Link,
    /// One for each command in flight.
    heads: Box<[Head]>,
    target: Arc<Target>,
    controller: Arc<Controller>,
    number: u16,
    patience: Duration,
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
    /// Connects a controller of its own, as [`Session::connect`] does.
    ///
    /// # Errors
    /// As [`Session::connect`].
    pub fn connect(target: Arc<Target>, patience: Duration) -> Result<Self, NvmeError> {
        Session::new(target).connect(patience)
    }

    fn new(
        target: Arc<Target>,
        controller: Arc<Controller>,
        link: Link,
        number: u16,
        patience: Duration,
    ) -> Self {
        let heads = (0..WINDOW).map(|_| Head::EMPTY).collect();
        Self { link, heads, target, controller, number, patience, next_id: 0, broken: false }
    }

    /// What it is connected to.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The epoch of the visitor for whom its controller was made.
    pub fn epoch(&self) -> u64 {
        self.controller.epoch
    }

    /// The life of the namespace's blocks, where the target tells: its UUID or NGUID.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.controller.facts.incarnation
    }

    /// Size of the namespace.
    pub fn size(&self) -> Bytes {
        Bytes(self.controller.facts.size)
    }

    /// Size of a block: 512 to 4096 bytes.
    pub fn block(&self) -> Bytes {
        Bytes(self.controller.facts.block())
    }

    /// Whether the controller can give room back: [`trim`](Self::trim) works.
    pub fn can_trim(&self) -> bool {
        let facts = &self.controller.facts;
        facts.can(optional::DATASET_MANAGEMENT) && facts.in_capsule >= size_of::<DsmRange>() as u64
    }

    /// Whether [`write_zeroes`](Self::write_zeroes) works.
    pub fn can_write_zeroes(&self) -> bool {
        self.controller.facts.can(optional::WRITE_ZEROES)
    }

    /// Whether [`flush`](Self::flush) does anything: there is a volatile write cache.
    pub fn can_flush(&self) -> bool {
        self.controller.facts.write_cache
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.controller.facts.read_only
    }

    /// The longest read or write that the controller takes at once.
    pub fn max_transfer(&self) -> Bytes {
        Bytes(self.controller.facts.max_transfer)
    }

    /// Whether nothing was allocated when the controller was made, and everything read as zeroes.
    pub fn was_empty(&self) -> bool {
        self.controller.facts.empty
    }

    /// Changes how long an operation may take, all its commands and their answers together.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Reads all of `into`, in as many commands at a time as may be in flight.
    ///
    /// # Errors
    /// [`NvmeError`]; the contents of `into` are then unspecified.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), NvmeError> {
        let longest = self.controller.facts.max_transfer as usize;
        let mut at = offset;
        let mut pieces = into.chunks_mut(longest).map(|into| {
            let offset = at;
            at += into.len() as u64;
            Operation::Read { offset, into }
        });
        self.run_all(&mut pieces)
    }

    /// Writes all of `from`, in as many commands at a time as may be in flight.
    ///
    /// # Errors
    /// [`NvmeError`]; any part may then have been written.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), NvmeError> {
        let longest = self.controller.facts.max_transfer as usize;
        let offsets = (offset..).step_by(longest);
        let mut pieces = from
            .chunks(longest)
            .zip(offsets)
            .map(|(from, offset)| Operation::Write { offset, from });
        self.run_all(&mut pieces)
    }

    /// Gives the room of a range back. What it reads as afterwards is the target's choice.
    ///
    /// # Errors
    /// [`NvmeError`].
    pub fn trim(&mut self, offset: u64, length: u32) -> Result<(), NvmeError> {
        self.run(&mut [Operation::Trim { offset, length }])
    }

    /// Makes a range read as zeroes, giving its room back where the target can.
    ///
    /// # Errors
    /// [`NvmeError`].
    pub fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<(), NvmeError> {
        let longest = self.controller.facts.max_zeroes;
        let end = offset + u64::from(length);
        let mut pieces = (offset..end).step_by(longest as usize).map(|offset| {
            // No more than the whole.
            Operation::WriteZeroes { offset, length: longest.min(end - offset) as u32 }
        });
        self.run_all(&mut pieces)
    }

    /// Makes what was acknowledged permanent, as far as the target can.
    ///
    /// # Errors
    /// [`NvmeError`].
    pub fn flush(&mut self) -> Result<(), NvmeError> {
        self.run(&mut [Operation::Flush])
    }

    /// Carries out as many operations as come, as many at a time as may be in flight. Kept short where there is but one:
    /// that is a page's way.
    fn run_all<'a>(
        &mut self,
        pieces: &mut dyn Iterator<Item = Operation<'a>>,
    ) -> Result<(), NvmeError> {
        let deadline = Deadline::after(self.patience);
        while let Some(first) = pieces.next() {
            let Some(second) = pieces.next() else { return self.run_by(deadline, &mut [first]) };
            let mut more = [first, second].into_iter().chain(&mut *pieces);
            let mut count = 0;
            let mut operations: [Operation<'_>; WINDOW] = array::from_fn(|_| match more.next() {
                Some(operation) => {
                    count += 1;
                    operation
                }
                None => Operation::Flush,
            });
            self.run_by(deadline, &mut operations[..count])?;
        }
        Ok(())
    }

    /// The error, after which the connection may be of no further use, and then the whole controller is not.
    fn fail(&mut self, failure: Failure) -> NvmeError {
        if failure.ends_connection() && !self.broken {
            self.broken = true;
            self.controller.end();
        }
        NvmeError::new(&self.target, failure)
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
