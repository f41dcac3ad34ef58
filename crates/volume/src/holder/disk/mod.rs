//! A copy of a lease's pages in a file on this host's disk, which lags behind.
//!
//! A write only puts its page into a [`ring`] in locked memory. A thread of the process, the
//! [`writer`], writes the ring to the files in batches. Until then, only the ring has the newest
//! version. The tags say which pages have arrived in the file: the next process believes no others.

mod ring;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE, WorkerId};

use self::ring::{Place, Ring};
use super::{FileHolder, Holder, HolderError, Piece};
use crate::events::Events;
use crate::tags::{Tags, UNKNOWN};

const PAGE: u64 = PAGE_SIZE as u64;

/// The file of one copy, and what is known of the pages in it.
pub(super) struct Backing {
    file: FileHolder,
    tags: Arc<Tags>,
    pages: u64,
}

/// The ring that disk copies share, and the thread that writes it to their files. Both end when
/// this is dropped.
pub(crate) struct DiskWriter {
    ring: Arc<Ring>,
    thread: Option<JoinHandle<()>>,
}

/// One copy on the disk.
#[derive(Clone)]
pub(crate) struct DiskHolder {
    ring: Arc<Ring>,
    backing: Arc<Backing>,
    /// The number of the copy in the ring.
    number: u32,
    /// The id of the copy's tags in the ledger.
    pub(crate) id: LeaseId,
    path: PathBuf,
}

impl DiskWriter {
    /// Makes a ring of this size and starts its thread.
    ///
    /// # Errors
    /// The memory cannot be locked, or the thread cannot be started.
    pub(crate) fn start(size: Bytes, events: Arc<Events>) -> io::Result<Self> {
        let ring = Arc::new(Ring::new(size, events)?);
        let of_thread = ring.clone();
        let thread = thread::Builder::new().name("disk-copy".to_owned());
        let thread = thread.spawn(move || writer::run(&of_thread))?;
        Ok(Self { ring, thread: Some(thread) })
    }

    /// Adds a copy of so many pages to the ring.
    pub(crate) fn add(
        &self,
        file: FileHolder,
        tags: Arc<Tags>,
        (pages, id, path): (u64, LeaseId, PathBuf),
    ) -> DiskHolder {
        let backing = Arc::new(Backing { file, tags, pages });
        let number = self.ring.add(backing.clone());
        DiskHolder { ring: self.ring.clone(), backing, number, id, path }
    }
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        self.ring.end();
        // Its last write must not reach a file that somebody uses again.
        self.thread.take().into_iter().for_each(|thread| _ = thread.join());
    }
}

impl DiskHolder {
    /// Forgets what has yet to reach the file. Nobody uses the copy afterwards.
    pub(crate) fn leave(&self) {
        self.ring.remove(self.number);
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns how much of the copy has yet to reach the file.
    pub(crate) fn in_ring(&self) -> Bytes {
        Bytes(self.ring.pages_of(self.number) * PAGE)
    }

    /// Returns why the disk takes no pages at present, if so.
    pub(crate) fn stalled(&self) -> Option<String> {
        self.ring.stalled()
    }

    /// Waits until half of the ring is free, so that writes need not wait for a repair. Returns
    /// false if the disk takes no pages.
    pub(crate) fn wait_for_half(&self) -> bool {
        self.ring.wait_for_half()
    }
}

/// Returns the pages of a range of whole pages.
fn pages(offset: u64, length: u64) -> std::ops::Range<u64> {
    debug_assert!((offset | length).is_multiple_of(PAGE), "whole pages");
    offset / PAGE..(offset + length) / PAGE
}

impl Holder for DiskHolder {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        let all = pages(offset, into.len() as u64);
        let part = |page: u64| (page - all.start) as usize * PAGE_SIZE;
        // Pages from here on come from the file.
        let mut start = all.start;
        for page in all.clone() {
            let data = &mut into[part(page)..part(page + 1)];
            // First the ring: a page leaves it only when the file has it.
            match self.ring.get(self.number, page, data) {
                Place::File => continue,
                Place::Hole => data.fill(0),
                Place::Ring => {}
            }
            let before = &mut into[part(start)..part(page)];
            if !before.is_empty() {
                self.backing.file.read(worker, start * PAGE, before)?;
            }
            start = page + 1;
        }
        match &mut into[part(start)..] {
            [] => Ok(()),
            rest => self.backing.file.read(worker, start * PAGE, rest),
        }
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
            for (page, data) in (offset / PAGE..).zip(data.chunks(PAGE_SIZE)) {
                let tag = tags.next().unwrap_or(UNKNOWN);
                self.ring.put((self.number, page), data, tag)?;
            }
        }
        Ok(())
    }

    /// Punches no hole yet: the thread does that.
    fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.ring.discard(self.number, pages(offset, length));
        Ok(())
    }

    /// Waits until the files have all that was written before.
    fn flush(&self, _: WorkerId) -> Result<(), HolderError> {
        self.ring.drain()
    }
}
