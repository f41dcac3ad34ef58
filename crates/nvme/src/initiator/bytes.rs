//! An NVMe namespace as a lease of bytes: parts of blocks are read, changed and written back.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_page::blocks::in_blocks;
use aquifer_page::visitor::Visitor;
use aquifer_page::{Bytes, Incarnation, PAGE_SIZE};
use aquifer_transport::initiating::Pipelined as _;
use aquifer_transport::initiator::{Connector, Initiator, InitiatorError};
use aquifer_transport::sleep::lock;

use super::{Connection, NvmeError, Operation, Session, Target};

/// The connections of one host to one namespace, which accept any range of bytes.
#[derive(Debug)]
pub struct ByteSession {
    session: Session,
    block: SharedBlock,
}

/// Held during a read or write of a partial block: one at a time.
type SharedBlock = Arc<Mutex<Box<Block>>>;

/// A buffer for one block of up to a page.
struct Block([u8; PAGE_SIZE]);

impl Block {
    const EMPTY: Self = Self([0; PAGE_SIZE]);

    /// Returns the first `length` bytes.
    fn first(&mut self, length: u64) -> &mut [u8] {
        &mut self.0[..length as usize]
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Block")
    }
}

/// An I/O queue that accepts any range of bytes.
#[derive(Debug)]
struct ByteConnection {
    queue: Connection,
    block: SharedBlock,
}

impl ByteSession {
    /// Makes a session without a controller; connects nothing.
    pub fn new(target: Target) -> Self {
        let block = Arc::new(Mutex::new(Box::new(Block::EMPTY)));
        Self { session: Session::new(Arc::new(target)), block }
    }
}

impl fmt::Display for ByteSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.session.target().fmt(f)
    }
}

impl Connector for ByteSession {
    fn connect(
        &self,
        visitor: Option<&Visitor>,
        io_timeout: Duration,
    ) -> Result<Box<dyn Initiator>, InitiatorError> {
        let queue = self.session.connect_as(visitor, io_timeout)?;
        Ok(Box::new(ByteConnection { queue, block: Arc::clone(&self.block) }))
    }
}

impl ByteConnection {
    /// Returns whether these bytes are whole blocks.
    fn is_whole(&self, offset: u64, length: u64) -> bool {
        (offset | length).is_multiple_of(self.queue.block().0)
    }

    fn zero(&mut self, offset: u64, length: u32) -> Result<(), NvmeError> {
        if self.is_whole(offset, length.into()) {
            return self.queue.write_zeroes(offset, length);
        }
        let (queue, mut block) = (&mut self.queue, lock(&self.block));
        in_blocks(offset, length.into(), queue.block().0, |whole, part| {
            if part.is_whole {
                // The part is no longer than the range, which fits 32 bits.
                return queue.write_zeroes(whole, part.length as u32);
            }
            let block = block.first(queue.block().0);
            queue.read(whole, block)?;
            block[part.start..][..part.length].fill(0);
            queue.write(whole, block)
        })
    }
}

impl Initiator for ByteConnection {
    fn epoch(&self) -> u64 {
        self.queue.epoch()
    }

    fn incarnation(&self) -> Option<Incarnation> {
        self.queue.incarnation()
    }

    fn size(&self) -> Bytes {
        self.queue.size()
    }

    fn is_read_only(&self) -> bool {
        self.queue.is_read_only()
    }

    /// All connections are I/O queues of one controller.
    fn can_multi_conn(&self) -> bool {
        true
    }

    fn can_flush(&self) -> bool {
        self.queue.can_flush()
    }

    fn longest_transfer(&self) -> Bytes {
        self.queue.max_transfer()
    }

    fn set_io_timeout(&mut self, io_timeout: Duration) {
        self.queue.set_io_timeout(io_timeout);
    }

    fn hole(&mut self, _offset: u64, length: u32) -> Result<u64, InitiatorError> {
        Ok(if self.queue.was_empty() { length.into() } else { 0 })
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), InitiatorError> {
        if self.is_whole(offset, into.len() as u64) {
            return Ok(self.queue.read(offset, into)?);
        }
        let (queue, mut block) = (&mut self.queue, lock(&self.block));
        let mut rest = into;
        Ok(in_blocks(offset, rest.len() as u64, queue.block().0, |whole, part| {
            let (now, later) = mem::take(&mut rest).split_at_mut(part.length);
            rest = later;
            if part.is_whole {
                return queue.read(whole, now);
            }
            let block = block.first(queue.block().0);
            queue.read(whole, block)?;
            now.copy_from_slice(&block[part.start..][..part.length]);
            Ok(())
        })?)
    }

    fn read_soon(
        &mut self,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, InitiatorError> {
        if self.is_whole(offset, into.len() as u64) {
            return Ok(self.queue.read_page_soon(offset, into, soon)?);
        }
        self.read(offset, into).map(|()| true)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), InitiatorError> {
        if self.is_whole(offset, from.len() as u64) {
            return Ok(self.queue.write(offset, from)?);
        }
        let (queue, mut block) = (&mut self.queue, lock(&self.block));
        let mut rest = from;
        Ok(in_blocks(offset, rest.len() as u64, queue.block().0, |whole, part| {
            let (now, later) = rest.split_at(part.length);
            rest = later;
            if part.is_whole {
                return queue.write(whole, now);
            }
            let block = block.first(queue.block().0);
            queue.read(whole, block)?;
            block[part.start..][..part.length].copy_from_slice(now);
            queue.write(whole, block)
        })?)
    }

    fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<bool, InitiatorError> {
        if !self.queue.can_write_zeroes() {
            return Ok(false);
        }
        match self.zero(offset, length) {
            Err(error) if error.ends_connection() => Err(error.into()),
            // Linux's target announces Write Zeroes for files even on file systems that then refuse
            // it.
            done => Ok(done.is_ok()),
        }
    }

    fn flush(&mut self) -> Result<(), InitiatorError> {
        Ok(self.queue.flush()?)
    }

    fn transfer(
        &mut self,
        operations: &mut [Operation<'_>],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), InitiatorError> {
        let is_whole = |operation: &Operation<'_>| {
            let (offset, length) = operation.range();
            self.is_whole(offset, length)
        };
        if operations.iter().all(is_whole) {
            return Ok(self.queue.run_while(operations, meanwhile)?);
        }
        operations.iter_mut().try_for_each(|operation| match operation {
            Operation::Read { offset, into } => self.read(*offset, into),
            Operation::Write { offset, from } => self.write(*offset, from),
            _ => Ok(()),
        })
    }
}
