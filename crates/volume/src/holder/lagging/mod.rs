//! A copy of a lease's pages that lags behind: in a file on this host's disk, or at a lender.
//!
//! A write only puts its page into a [`ring`] in locked memory. A thread of the process, the
//! [`writer`], writes the ring to the copies' sinks in batches. Until then, only the ring has the
//! newest version. The tags say which pages have arrived: the next process believes no others.

mod ring;
#[cfg(test)]
mod tests;
mod writer;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_page::{Bytes, PAGE_SIZE, WorkerId};

use self::ring::{Place, Ring};
use super::{Holder, HolderError, Piece, PieceMut};
use crate::lock;
use crate::tags::Tags;

const PAGE: u64 = PAGE_SIZE as u64;

/// Called with the reason when a sink takes no pages, and with `None` once it takes some again.
pub(crate) type Tell = Box<dyn Fn(Option<&HolderError>) + Send + Sync>;

/// How the copies of a ring lag behind.
pub(crate) struct Lag {
    /// How long pages wait for others to be written with, unless the ring fills up.
    pub(crate) lag: Duration,
    pub(crate) tell: Tell,
}

impl Lag {
    pub(crate) fn of_disk(tell: Tell) -> Self {
        Self { lag: Duration::from_millis(100), tell }
    }

    /// A lender loses pages more often than this host its disk.
    pub(crate) fn of_lender(tell: Tell) -> Self {
        Self { lag: Duration::from_millis(10), tell }
    }
}

/// Where one copy is in the end, and what is known of the pages there.
pub(super) struct Backing {
    sink: Box<dyn Holder>,
    /// The worker of the sink that the thread is.
    worker: WorkerId,
    tags: Arc<Tags>,
    pages: u64,
}

/// A ring that some copies share, and the thread that writes it to their sinks. Both end when this
/// is dropped.
pub(crate) struct LagWriter {
    ring: Arc<Ring>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// One lagging copy.
#[derive(Clone)]
pub(crate) struct LaggingHolder {
    ring: Arc<Ring>,
    backing: Arc<Backing>,
    /// The number of the copy in the ring.
    number: u32,
    /// The ring's thread, if this is its only copy.
    own: Option<Arc<LagWriter>>,
}

impl fmt::Debug for LagWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LagWriter").finish_non_exhaustive()
    }
}

impl LagWriter {
    /// Makes a ring of this size and starts its thread.
    ///
    /// # Errors
    /// The memory cannot be locked, or the thread cannot be started.
    pub(crate) fn start(size: Bytes, lag: Lag) -> io::Result<Self> {
        let ring = Arc::new(Ring::new(size, lag)?);
        let of_thread = ring.clone();
        let thread = thread::Builder::new().name("lagging-copy".to_owned());
        let thread = thread.spawn(move || writer::run(&of_thread))?;
        Ok(Self { ring, thread: Mutex::new(Some(thread)) })
    }

    /// Adds a copy of so many pages to the ring. The thread is this worker of the sink.
    pub(crate) fn add(
        &self,
        sink: Box<dyn Holder>,
        tags: Arc<Tags>,
        (pages, worker): (u64, WorkerId),
    ) -> LaggingHolder {
        let backing = Arc::new(Backing { sink, worker, tags, pages });
        let number = self.ring.add(backing.clone());
        LaggingHolder { ring: self.ring.clone(), backing, number, own: None }
    }

    /// Makes the one copy of a ring of its own.
    pub(crate) fn alone(
        self,
        sink: Box<dyn Holder>,
        tags: Arc<Tags>,
        of: (u64, WorkerId),
    ) -> LaggingHolder {
        let holder = self.add(sink, tags, of);
        LaggingHolder { own: Some(Arc::new(self)), ..holder }
    }
}

impl LagWriter {
    /// Waits for the end of the thread: its last write must not reach a sink that somebody uses
    /// again.
    fn end(&self) {
        self.ring.end();
        let thread = lock(&self.thread).take();
        thread.into_iter().for_each(|thread| _ = thread.join());
    }
}

impl Drop for LagWriter {
    fn drop(&mut self) {
        self.end();
    }
}

impl LaggingHolder {
    /// Forgets what has yet to reach the sink. Nobody uses the copy afterwards.
    pub(crate) fn leave(&self) {
        self.ring.remove(self.number);
    }

    /// Returns how much of the copy has yet to reach the sink.
    pub(crate) fn in_ring(&self) -> Bytes {
        Bytes(self.ring.pages_of(self.number) * PAGE)
    }

    /// Returns the size of the ring.
    pub(crate) fn ring_size(&self) -> Bytes {
        Bytes(self.ring.capacity as u64 * PAGE)
    }

    /// Returns whether the sink takes no pages at all.
    pub(crate) fn is_stalled(&self) -> bool {
        self.ring.is_stalled()
    }

    /// Returns why the sink takes no pages, or refuses some.
    pub(crate) fn trouble(&self) -> Option<HolderError> {
        self.ring.trouble()
    }

    /// Waits a little until half of the ring is free, so that writes need not wait for a repair.
    /// Returns whether it is.
    pub(crate) fn wait_for_half(&self) -> bool {
        self.ring.wait_for_half()
    }
}

/// Returns the pages of a range of whole pages.
fn pages(offset: u64, length: u64) -> std::ops::Range<u64> {
    debug_assert!((offset | length).is_multiple_of(PAGE), "whole pages");
    offset / PAGE..(offset + length) / PAGE
}

impl Holder for LaggingHolder {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        let all = pages(offset, into.len() as u64);
        let part = |page: u64| (page - all.start) as usize * PAGE_SIZE;
        // Pages from here on come from the sink.
        let mut start = all.start;
        for page in all.clone() {
            let data = &mut into[part(page)..part(page + 1)];
            // First the ring: a page leaves it only when the sink has it.
            match self.ring.get(self.number, page, data) {
                Place::Sink => continue,
                Place::Hole => data.fill(0),
                Place::Ring => {}
            }
            let before = &mut into[part(start)..part(page)];
            if !before.is_empty() {
                self.backing.sink.read(worker, start * PAGE, before)?;
            }
            start = page + 1;
        }
        match &mut into[part(start)..] {
            [] => Ok(()),
            rest => self.backing.sink.read(worker, start * PAGE, rest),
        }
    }

    fn read_soon(
        &self,
        worker: WorkerId,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, HolderError> {
        if self.ring.has_none_of(self.number, pages(offset, into.len() as u64)) {
            return self.backing.sink.read_soon(worker, offset, into, soon);
        }
        self.read(worker, offset, into).map(|()| true)
    }

    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Result<(), HolderError> {
        let all = pieces.iter().map(|(offset, into)| pages(*offset, into.len() as u64));
        if self.ring.has_none_of(self.number, all.flatten()) {
            return self.backing.sink.read_many(worker, pieces);
        }
        pieces.iter_mut().try_for_each(|(offset, into)| self.read(worker, *offset, into))
    }

    /// Writes pages that the next process will not believe.
    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.write_tagged(worker, &[(offset, data)], &[])
    }

    fn write_tagged(
        &self,
        _: WorkerId,
        pieces: &[Piece<'_>],
        tags: &[u64],
    ) -> Result<(), HolderError> {
        let mut tags = tags.iter().copied();
        for (offset, data) in pieces {
            self.ring.put((self.number, offset / PAGE), data, &mut tags)?;
        }
        Ok(())
    }

    /// Discards nothing at the sink yet: the thread does that.
    fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.ring.discard(self.number, pages(offset, length));
        Ok(())
    }

    /// Waits until the sinks have all that was written before.
    fn flush(&self, _: WorkerId) -> Result<(), HolderError> {
        self.ring.drain()
    }

    fn unreachable_for(&self) -> Option<Duration> {
        self.backing.sink.unreachable_for()
    }

    fn is_lost(&self) -> bool {
        self.backing.sink.is_lost()
    }

    fn set_patience(&self, patience: Option<Duration>) {
        self.backing.sink.set_patience(patience);
    }

    fn probe(&self) {
        self.backing.sink.probe();
    }

    fn end_older(&self) {
        self.backing.sink.end_older();
    }

    fn close(&self) {
        self.own.iter().for_each(|own| own.ring.end());
        self.backing.sink.close();
        self.own.iter().for_each(|own| own.end());
    }
}
