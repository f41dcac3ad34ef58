//! Holders of extents. To add a kind, add a file here that implements [`Holder`].

mod broken;
mod copies;
mod file;
mod lagging;
mod remote;
mod source;
mod turns;
mod verified;

use std::error::Error;
use std::time::Duration;

use aquifer_page::{PAGE_SIZE, WorkerId};
use aquifer_transport::initiator::InitiatorError;

pub(crate) use broken::BrokenHolder;
pub(crate) use copies::{Copies, Copy, DiskFile, Second, fall_behind};
pub use file::FileHolder;
pub(crate) use lagging::{Lag, LagWriter, LaggingHolder};
pub use remote::RemoteHolder;
pub use source::Source;
pub(crate) use verified::{Sealed, VerifiedHolder};

/// An offset, and the bytes to write there.
pub type Piece<'a> = (u64, &'a [u8]);

/// An offset, and the buffer for the bytes to read there.
pub type PieceMut<'a> = (u64, &'a mut [u8]);

/// A linear space of bytes that holds extents. Its user sees all zeroes at first.
///
/// `worker` is a number below the holder's count of workers, so that each thread can have its own
/// connection. One worker makes one call at a time. Operations of different workers on different
/// ranges MUST NOT wait for one another. `read`, `read_soon`, `write` and `discard` are on the page
/// path: they MUST NOT allocate unless something is wrong. The caller may repeat any operation.
pub trait Holder: Send + Sync {
    /// Fills the buffer.
    ///
    /// # Errors
    /// [`HolderError`]; the buffer's contents are then unspecified.
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError>;

    /// As [`read`](Self::read), of a page. Returns false if the lender lets the caller wait for
    /// longer than `soon`. A holder may also wait until it has the page.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_soon(
        &self,
        worker: WorkerId,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, HolderError> {
        let _ = soon;
        self.read(worker, offset, into).map(|()| true)
    }

    /// Writes the data.
    ///
    /// # Errors
    /// [`HolderError`], such as [`HolderError::Full`] if the data does not fit. Any part may have
    /// been written after an error.
    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError>;

    /// Makes the range read as zeroes and frees its room.
    ///
    /// # Errors
    /// [`HolderError`]; any part may then have been discarded.
    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError>;

    /// Makes acknowledged writes permanent, where the holder has permanent storage.
    ///
    /// # Errors
    /// [`HolderError`], if the holder fails.
    fn flush(&self, worker: WorkerId) -> Result<(), HolderError>;

    /// Fills many buffers, with the reads in flight together where that is faster.
    ///
    /// # Errors
    /// As [`read`](Self::read), for all buffers.
    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Result<(), HolderError> {
        pieces.iter_mut().try_for_each(|(offset, into)| self.read(worker, *offset, into))
    }

    /// Writes many runs, in flight together where that is faster.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn write_many(&self, worker: WorkerId, pieces: &[Piece<'_>]) -> Result<(), HolderError> {
        pieces.iter().try_for_each(|(offset, data)| self.write(worker, *offset, data))
    }

    /// As [`write_many`](Self::write_many), of whole pages. A holder may keep their tags: the
    /// numbers by which the caller verifies them later.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn write_tagged(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        tags: &[u64],
    ) -> Result<(), HolderError> {
        let _ = tags;
        self.write_many(worker, pieces)
    }

    /// As [`write_tagged`](Self::write_tagged). May call `meanwhile`, once or more, while another
    /// process works on the writes.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn write_while(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        tags: &[u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), HolderError> {
        let _ = meanwhile;
        self.write_tagged(worker, pieces, tags)
    }

    /// Returns how long the holder has been unreachable; `None` while it is reachable.
    fn unreachable_for(&self) -> Option<Duration> {
        None
    }

    /// Returns whether the holder is known to have lost its data. A later success revokes this.
    fn is_lost(&self) -> bool {
        false
    }

    /// Sets how long an operation may wait for an unreachable holder; `None` for the timeout that
    /// the holder was made with.
    fn set_patience(&self, _: Option<Duration>) {}

    /// Tries to reach an unreachable holder again. May take about a second.
    fn probe(&self) {}

    /// Makes the lender end its owner's clients of earlier generations, before it serves the next
    /// request.
    fn end_older(&self) {}

    /// Releases connections and other resources. The caller does not use the holder afterwards.
    fn close(&self) {}
}

/// The reason why an operation of a holder failed.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// The holder could not be reached before the timeout.
    #[error("unreachable for {} ms: {source}", waited.as_millis())]
    Unreachable {
        /// The time for which the holder has been unreachable.
        waited: Duration,
        /// The last error.
        source: Box<InitiatorError>,
    },
    /// The holder's data is gone, or belongs to another owner. The data may come back, so a retry
    /// may succeed.
    #[error("lost: {0}")]
    Lost(Box<dyn Error + Send + Sync>),
    /// The holder's data is not what this host stored last, or this host does not know what that
    /// was. During a write of the page, this proves nothing.
    #[error("{0}")]
    Wrong(Wrong),
    /// The holder has no room.
    #[error("it is full: {0}")]
    Full(Box<dyn Error + Send + Sync>),
    /// The holder failed otherwise.
    #[error("{0}")]
    Failed(Box<dyn Error + Send + Sync>),
}

impl HolderError {
    /// Returns the same error, for another operation.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Unreachable { waited, source } => {
                let why = source.failure.to_string();
                let source = InitiatorError::new(&source.target, source.outcome, why);
                Self::Unreachable { waited: *waited, source: Box::new(source) }
            }
            Self::Lost(why) => Self::Lost(why.to_string().into()),
            Self::Wrong(wrong) => Self::Wrong(*wrong),
            Self::Full(why) => Self::Full(why.to_string().into()),
            Self::Failed(why) => Self::Failed(why.to_string().into()),
        }
    }
}

/// What is wrong with a page that a holder returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// Zeroes, for other data.
    #[error("it returned zeroes for a page that held other data")]
    Zeroes,
    /// Other data: a changed page, another page, or an old version.
    #[error("it returned a page that differs from the one stored there last")]
    Other,
    /// It may be any version, as the last write failed.
    #[error("the last write of the page failed, so its content is not known; write it again")]
    Unknown,
}

/// Zeroes to write where a holder cannot make them itself.
static ZEROES: [u8; 64 * PAGE_SIZE] = [0; 64 * PAGE_SIZE];

/// Discards by writing zeroes.
fn write_zeroes<E>(
    offset: u64,
    length: u64,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = offset;
    while at < offset + length {
        let some = ZEROES.len().min((offset + length - at) as usize);
        write(at, &ZEROES[..some])?;
        at += some as u64;
    }
    Ok(())
}
