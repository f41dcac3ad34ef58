//! A connection to a lease, by NBD or NVMe/TCP.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_fabric::nbd::client::{self as nbd, NbdError, Operation, Run};
use aquifer_fabric::nvme::initiator::{self as nvme, NvmeError, Session};
use aquifer_page::{Bytes, Incarnation, PAGE_SIZE};

use super::blocks::{Block, in_blocks};
use crate::claim::{Claim, Identity};
use crate::lock;

/// The source of connections to a lease.
pub enum Source {
    /// An export of an NBD server.
    Nbd(NbdSource),
    /// A namespace of an NVMe/TCP target.
    Nvme(NvmeSource),
}

/// The source of connections to an export, and the identity that they present.
#[derive(Debug)]
pub struct NbdSource {
    target: Arc<nbd::Target>,
    identity: Option<Identity>,
}

/// The source of connections to a namespace, and the identity that they present.
#[derive(Debug)]
pub struct NvmeSource {
    session: Session,
    identity: Option<Identity>,
    /// Held during a read or write of a partial block: one at a time.
    block: Arc<Mutex<Box<Block>>>,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(source) => source.target.fmt(f),
            Self::Nvme(source) => source.session.fmt(f),
        }
    }
}

impl From<nbd::Target> for Source {
    fn from(target: nbd::Target) -> Self {
        Self::Nbd(NbdSource { target: Arc::new(target), identity: None })
    }
}

impl From<nvme::Target> for Source {
    fn from(target: nvme::Target) -> Self {
        let block = Arc::new(Mutex::new(Box::new(Block::EMPTY)));
        Self::Nvme(NvmeSource { session: Session::new(Arc::new(target)), identity: None, block })
    }
}

/// An error of a connection to a lease.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// An error of a connection by NBD.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// An error of a connection by NVMe/TCP.
    #[error(transparent)]
    Nvme(#[from] NvmeError),
}

impl LinkError {
    /// Returns whether the connection is of no further use. A new one may work.
    pub fn ends_connection(&self) -> bool {
        match self {
            Self::Nbd(error) => error.ends_connection(),
            Self::Nvme(error) => error.ends_connection(),
        }
    }

    /// Returns whether the lender reported the stored data as gone, or as another owner's.
    pub fn is_loss(&self) -> bool {
        match self {
            Self::Nbd(error) => error.is_loss(),
            Self::Nvme(error) => error.is_loss(),
        }
    }

    /// Returns whether the data there belongs to another owner.
    pub fn is_claimed(&self) -> bool {
        match self {
            Self::Nbd(error) => matches!(error.failure, nbd::Failure::Claimed(_)),
            Self::Nvme(error) => matches!(error.failure, nvme::Failure::Claimed(_)),
        }
    }

    /// Returns whether a retry cannot change the answer.
    pub(super) fn is_final(&self) -> bool {
        match self {
            Self::Nbd(error) => matches!(error.failure, nbd::Failure::Forgot { .. }),
            Self::Nvme(error) => matches!(error.failure, nvme::Failure::Forgot { .. }),
        }
    }

    /// Returns whether the lender has no room for the written data.
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Nbd(error) => error.is_no_space(),
            Self::Nvme(error) => error.is_no_space(),
        }
    }
}

/// A connection to a lease, which accepts any range of bytes. Each worker has one, and all work at
/// the same time.
pub(super) enum Link {
    Nbd(nbd::Connection),
    Nvme(nvme::Connection, Arc<Mutex<Box<Block>>>),
}

impl Source {
    /// Adds the identity that connections present to the lender.
    #[must_use]
    pub fn claimed(self, claim: Claim, takes_over: bool) -> Self {
        let identity = Some(Identity::new(claim, takes_over));
        match self {
            Self::Nbd(source) => Self::Nbd(NbdSource { identity, ..source }),
            Self::Nvme(source) => Self::Nvme(NvmeSource { identity, ..source }),
        }
    }

    /// Connects, and returns the epoch to which the connection belongs.
    pub(super) fn connect(&self, io_timeout: Duration) -> Result<(Link, u64), LinkError> {
        let visitor = self.identity().map(Identity::visitor);
        match self {
            Self::Nbd(source) => {
                let (target, epoch) =
                    (Arc::clone(&source.target), visitor.as_ref().map_or(0, |it| it.epoch));
                let connection = nbd::Connection::connect_as(target, visitor.as_ref(), io_timeout)?;
                self.check(connection.incarnation())?;
                Ok((Link::Nbd(connection), epoch))
            }
            Self::Nvme(source) => {
                let connection = source.session.connect_as(visitor.as_ref(), io_timeout)?;
                self.check(connection.incarnation())?;
                let epoch = connection.epoch();
                Ok((Link::Nvme(connection, Arc::clone(&source.block)), epoch))
            }
        }
    }

    fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Nbd(source) => source.identity.as_ref(),
            Self::Nvme(source) => source.identity.as_ref(),
        }
    }

    /// Returns the current epoch. Connections of any other epoch are of no further use.
    pub(super) fn epoch(&self) -> u64 {
        self.identity().map_or(0, Identity::epoch)
    }

    /// Ends all connections of this epoch, because one of them has broken and its requests may
    /// still arrive.
    pub(super) fn broke(&self, epoch: u64) {
        self.identity().into_iter().for_each(|identity| identity.broke(epoch));
    }

    /// Records that the owner has moved here for good: see [`Identity::end_older`].
    pub(super) fn end_older(&self) {
        self.identity().into_iter().for_each(Identity::end_older);
    }

    /// Returns the incarnation of the pages there, if it is known.
    pub(super) fn incarnation(&self) -> Option<Incarnation> {
        self.identity().and_then(Identity::incarnation)
    }

    /// Returns the error for a connection that failed earlier, if no new attempt is made.
    pub(super) fn broken(&self) -> LinkError {
        self.error(nbd::Failure::Broken, nvme::Failure::Broken)
    }

    /// Checks that the lender still has the incarnation that it had first.
    fn check(&self, found: Option<Incarnation>) -> Result<(), LinkError> {
        let checked = self.identity().map_or(Ok(()), |identity| identity.check(found));
        checked.map_err(|expected| {
            let found = found.map_or_else(|| "unknown".to_owned(), |found| found.to_string());
            self.error(
                nbd::Failure::Forgot { expected, found: found.clone() },
                nvme::Failure::Forgot { expected, found },
            )
        })
    }

    /// Makes an error of the protocol in use.
    fn error(&self, nbd: nbd::Failure, nvme: nvme::Failure) -> LinkError {
        match self {
            Self::Nbd(source) => {
                NbdError { target: Arc::clone(&source.target), failure: nbd }.into()
            }
            Self::Nvme(source) => {
                NvmeError { target: Arc::clone(source.session.target()), failure: nvme }.into()
            }
        }
    }
}

impl Link {
    pub(super) fn set_io_timeout(&mut self, io_timeout: Duration) {
        match self {
            Self::Nbd(link) => link.set_io_timeout(io_timeout),
            Self::Nvme(link, _) => link.set_io_timeout(io_timeout),
        }
    }

    pub(super) fn size(&self) -> Bytes {
        match self {
            Self::Nbd(link) => link.size(),
            Self::Nvme(link, _) => link.size(),
        }
    }

    /// Returns whether connections see each other's writes (NBD: `NBD_FLAG_CAN_MULTI_CONN`).
    pub(super) fn can_multi_conn(&self) -> bool {
        match self {
            Self::Nbd(link) => link.can_multi_conn(),
            // All connections are I/O queues of one controller.
            Self::Nvme(..) => true,
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        match self {
            Self::Nbd(link) => link.is_read_only(),
            Self::Nvme(link, _) => link.is_read_only(),
        }
    }

    /// Returns how many bytes from the start of the range are known to be a hole, so read as
    /// zeroes.
    pub(super) fn hole(&mut self, offset: u64, length: u32) -> Result<u64, LinkError> {
        match self {
            Self::Nbd(link) if link.knows_holes() => {
                let mut runs: Vec<Run> = Vec::new();
                link.block_status(offset, length, &mut runs)?;
                Ok(runs.iter().take_while(|run| run.hole).map(|run| u64::from(run.length)).sum())
            }
            Self::Nvme(link, _) if link.was_empty() => Ok(length.into()),
            _ => Ok(0),
        }
    }

    pub(super) fn can_write_zeroes(&self) -> bool {
        match self {
            Self::Nbd(link) => link.can_write_zeroes(),
            Self::Nvme(link, _) => link.can_write_zeroes(),
        }
    }

    pub(super) fn can_flush(&self) -> bool {
        match self {
            Self::Nbd(link) => link.can_flush(),
            Self::Nvme(link, _) => link.can_flush(),
        }
    }

    pub(super) fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), LinkError> {
        match self {
            Self::Nbd(link) => Ok(link.read(offset, into)?),
            Self::Nvme(link, _) if is_whole(link, offset, into.len() as u64) => {
                Ok(link.read(offset, into)?)
            }
            Self::Nvme(link, block) => {
                let mut block = lock(block);
                let mut rest = into;
                in_blocks(offset, rest.len() as u64, link.block().0, |whole, range| {
                    let (now, later) = std::mem::take(&mut rest).split_at_mut(range.length);
                    rest = later;
                    if range.is_whole {
                        return link.read(whole, now);
                    }
                    let block = block.first(link.block().0);
                    link.read(whole, block)?;
                    now.copy_from_slice(&block[range.start..][..range.length]);
                    Ok(())
                })?;
                Ok(())
            }
        }
    }

    pub(super) fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), LinkError> {
        match self {
            Self::Nbd(link) => Ok(link.write(offset, from)?),
            Self::Nvme(link, _) if is_whole(link, offset, from.len() as u64) => {
                Ok(link.write(offset, from)?)
            }
            Self::Nvme(link, block) => {
                let mut block = lock(block);
                let mut rest = from;
                in_blocks(offset, rest.len() as u64, link.block().0, |whole, range| {
                    let (now, later) = rest.split_at(range.length);
                    rest = later;
                    if range.is_whole {
                        return link.write(whole, now);
                    }
                    let block = block.first(link.block().0);
                    link.read(whole, block)?;
                    block[range.start..][..range.length].copy_from_slice(now);
                    link.write(whole, block)
                })?;
                Ok(())
            }
        }
    }

    pub(super) fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<(), LinkError> {
        match self {
            Self::Nbd(link) => Ok(link.write_zeroes(offset, length)?),
            Self::Nvme(link, block) => {
                let block_size = link.block().0;
                if is_whole(link, offset, length.into()) {
                    return Ok(link.write_zeroes(offset, length)?);
                }
                let mut block = lock(block);
                in_blocks(offset, length.into(), block_size, |whole, range| {
                    if range.is_whole {
                        // The part is no longer than the whole, which fits 32 bits.
                        return link.write_zeroes(whole, range.length as u32);
                    }
                    let block = block.first(block_size);
                    link.read(whole, block)?;
                    block[range.start..][..range.length].fill(0);
                    link.write(whole, block)
                })?;
                Ok(())
            }
        }
    }

    pub(super) fn flush(&mut self) -> Result<(), LinkError> {
        match self {
            Self::Nbd(link) => Ok(link.flush()?),
            Self::Nvme(link, _) => Ok(link.flush()?),
        }
    }

    /// Returns the longest single write that the lender accepts, in bytes of whole pages.
    pub(super) fn longest_write(&self) -> usize {
        let longest = match self {
            Self::Nbd(link) => link.max_payload().0,
            Self::Nvme(link, _) => link.max_transfer().0,
        };
        (longest as usize / PAGE_SIZE).max(1) * PAGE_SIZE
    }

    /// Runs writes, many in flight. The caller makes none longer than
    /// [`longest_write`](Self::longest_write).
    pub(super) fn write_all(&mut self, writes: &mut [Operation<'_>]) -> Result<(), LinkError> {
        match self {
            Self::Nbd(link) => Ok(link.run(writes)?),
            Self::Nvme(link, _) => {
                let is_plain = |operation: &Operation<'_>| match operation {
                    Operation::Write { offset, from } => is_whole(link, *offset, from.len() as u64),
                    _ => true,
                };
                if writes.iter().all(is_plain) {
                    return Ok(link.run(writes)?);
                }
                writes.iter().try_for_each(|operation| match operation {
                    Operation::Write { offset, from } => self.write(*offset, from),
                    _ => Ok(()),
                })
            }
        }
    }
}

/// Returns whether these bytes are whole blocks.
fn is_whole(link: &nvme::Connection, offset: u64, length: u64) -> bool {
    (offset | length).is_multiple_of(link.block().0)
}
