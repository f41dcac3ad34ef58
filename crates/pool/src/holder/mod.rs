//! What can hold extents. To add a kind: a file here that implements [`Holder`].

mod blocks;
mod file;
mod link;
mod remote;
mod sealed;

use std::error::Error;
use std::time::Duration;

use aquifer_page::PAGE_SIZE;

pub use file::FileHolder;
pub use link::{LinkError, NbdSource, Source};
pub use remote::RemoteHolder;
pub(crate) use sealed::SealedHolder;

/// A run of bytes to be written at an offset.
pub type Piece<'a> = (u64, &'a [u8]);

/// A linear space of bytes that holds extents, all zeroes at first as far as its user is concerned.
///
/// `worker` tells threads apart, so that each can have a connection of its own: a number up to the holder's count. Calls of one
/// worker at a time. Operations of different workers on different ranges MUST NOT wait for one another. `read`,
/// `write` and `discard` MUST NOT allocate unless something is wrong: they are on the page path. All can be repeated.
pub trait Holder: Send + Sync {
    /// Fills the buffer.
    ///
    /// # Errors
    /// [`HolderError`]; the buffer's contents are then unspecified.
    fn read(&self, worker: usize, offset: u64, into: &mut [u8]) -> Result<(), HolderError>;

    /// Writes the data.
    ///
    /// # Errors
    /// [`HolderError::Full`] if it does not fit; any part may have been written after an error.
    fn write(&self, worker: usize, offset: u64, data: &[u8]) -> Result<(), HolderError>;

    /// Makes the range read as zeroes and gives its room back.
    ///
    /// # Errors
    /// [`HolderError`]; any part may then have been discarded.
    fn discard(&self, worker: usize, offset: u64, length: u64) -> Result<(), HolderError>;

    /// Makes what was acknowledged permanent, as far as that means anything.
    ///
    /// # Errors
    /// [`HolderError`].
    fn flush(&self, worker: usize) -> Result<(), HolderError>;

    /// Writes many runs, all under way at once where that is faster.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn write_many(&self, worker: usize, pieces: &[Piece<'_>]) -> Result<(), HolderError> {
        pieces.iter().try_for_each(|(offset, data)| self.write(worker, *offset, data))
    }

    /// How long it has not been reachable, if it is not.
    fn unreachable_for(&self) -> Option<Duration> {
        None
    }

    /// Whether it is known to have lost what it held, until it is found to have it after all.
    fn is_lost(&self) -> bool {
        false
    }

    /// Tries whether it can be reached again, if it could not be. May take about a second.
    fn probe(&self) {}

    /// From the next request on, the lender first ends its owner's clients of earlier generations.
    fn end_older(&self) {}

    /// Lets go of connections and the like; nothing is asked of it afterwards.
    fn close(&self) {}
}

/// Why a holder could not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// It could not be reached for as long as patience lasts.
    #[error("not reachable for {} ms: {source}", waited.as_millis())]
    Unreachable {
        /// How long it was waited for.
        waited: Duration,
        /// What was found last.
        source: Box<LinkError>,
    },
    /// What it held is gone, or not its user's any more. It may come back: whoever asks again hears.
    #[error("lost: {0}")]
    Lost(Box<dyn Error + Send + Sync>),
    /// It has no room.
    #[error("it is full: {0}")]
    Full(Box<dyn Error + Send + Sync>),
    /// It failed.
    #[error("{0}")]
    Failed(Box<dyn Error + Send + Sync>),
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
