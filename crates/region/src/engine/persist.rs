//! Write-back of all dirty pages to the volume while programs run.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::PAGE_SIZE;

use super::Engine;
use super::evict::part_of;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::program::Program;
use crate::table::{Page, Place};

/// The number of pages examined, and written if dirty, together.
const CHUNK: u64 = 256;

/// Dirty pages under write-back while programs have them mapped. The table lists them as leaving,
/// so that no other thread writes or evicts them.
struct Taken {
    pages: Vec<u64>,
    /// The state of each page before.
    were: Vec<Page>,
    /// The programs that may write to them.
    programs: Vec<Arc<Program>>,
    /// How often programs had unmapped pages when the pages were taken.
    released: u64,
}

impl Engine {
    /// Writes to the volume all pages that were dirty at this call. Programs run on, and all pages
    /// stay in the cache. Returns the number of dirty pages.
    ///
    /// # Errors
    /// Pages cannot be written; they stay, still dirty.
    pub fn persist(&self) -> Result<u64, RegionError> {
        self.watch()?;
        let _looking = lock(&self.programs.looking);
        let (mut written, mut next) = (0, 0);
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        while next < self.table.pages() {
            self.wait_until(Self::is_known)?;
            let chunk = next..(next + CHUNK).min(self.table.pages());
            let taken = self.take_dirty(chunk, &mut next)?;
            written += taken.pages.len() as u64;
            self.write_taken(taken, &mut buffer)?;
        }
        self.lenders.volume.flush(self.control_worker())?;
        Ok(written)
    }

    /// Takes the dirty pages of the chunk, as leaving. It stops at a page on its way, and sets
    /// `next` to that.
    fn take_dirty(&self, chunk: Range<u64>, next: &mut u64) -> Result<Taken, RegionError> {
        let mut cache = lock(&self.cache);
        self.may_change()?;
        let released = self.programs.released.load(Ordering::Relaxed);
        let mut taken =
            Taken { pages: Vec::new(), were: Vec::new(), programs: self.programs(), released };
        self.note_dirty(&mut cache, &chunk).map_err(cannot_look)?;
        for page in chunk {
            let is = self.table.get(page);
            match is.place {
                Place::Filling | Place::Leaving if taken.pages.is_empty() => {
                    self.wait_for_change(cache);
                    return Ok(taken);
                }
                Place::Filling | Place::Leaving => return Ok(taken),
                Place::Resident | Place::Unmapped | Place::Shared if is.is_known_dirty() => {
                    self.take(&mut cache, page, is, Place::Leaving);
                    taken.pages.push(page);
                    taken.were.push(is);
                }
                _ => {}
            }
            *next = page + 1;
        }
        Ok(taken)
    }

    /// Reads the pages, one after the other, while programs may write to them.
    fn read_all(&self, pages: &[u64], were: &[Page], into: &mut [u8]) -> io::Result<()> {
        if pages.iter().all(|page| self.group.sharers.get(*page).is_none()) {
            return self.file.read_pages(pages, into);
        }
        let mut pages = pages.iter().zip(were).zip(into.chunks_exact_mut(PAGE_SIZE));
        pages.try_for_each(|((page, was), into)| self.read_here(*page, *was, into))
    }

    /// Writes the pages, and puts them back. A page that no program wrote to meanwhile is clean.
    fn write_taken(&self, taken: Taken, buffer: &mut [u8]) -> Result<(), RegionError> {
        let Taken { pages, were, programs, released } = taken;
        if pages.is_empty() {
            return Ok(());
        }
        let read = self.read_all(&pages, &were, buffer);
        let content = |run: &Range<u64>| part_of(&pages, buffer, run);
        let (written, mut failed) = match read {
            Ok(()) => self.write_back(self.control_worker(), &pages, &pages, content),
            Err(error) => (Vec::new(), Some(cannot_look(error))),
        };
        let mut cache = lock(&self.cache);
        let here = self.programs();
        // The marks prove nothing if a program is gone or has unmapped pages. A device's writes
        // leave none.
        let are_the_same = self.programs.released.load(Ordering::Relaxed) == released
            && programs.iter().all(|program| here.iter().any(|other| Arc::ptr_eq(other, program)));
        let mapped = pages.iter().zip(&were).filter(|(_, was)| was.place == Place::Resident);
        let mapped = runs(mapped.map(|(page, _)| *page));
        let are_known = are_the_same && self.pinned_by().is_none();
        let again = if are_known {
            self.unproven(&mut cache, &mapped)
        } else {
            Ok(pages.iter().copied().collect())
        };
        let again = again.unwrap_or_else(|error| {
            failed = Some(cannot_look(error));
            pages.iter().copied().collect()
        });
        let mut wanted = Vec::new();
        for (at, (page, was)) in pages.iter().zip(were).enumerate() {
            let is = self.table.get(*page);
            let stored = written.get(at).and_then(|(_, stored)| *stored);
            // A page of zeroes is still dirty, as the volume does not have it.
            let dirty = stored != Some(true) || again.contains(page);
            let is_stored = stored.unwrap_or(is.stored);
            self.table.set(*page, Page { stored: is_stored, dirty, wanted: false, ..was });
            match was.place {
                Place::Resident => cache.policy.came(*page),
                Place::Shared => {}
                _ => cache.cold_list.push_back(*page),
            }
            if is.wanted {
                wanted.push(*page);
            }
        }
        drop(cache);
        self.arrived(&wanted);
        failed.map_or(Ok(()), Err)
    }
}

pub(super) fn cannot_look(source: io::Error) -> RegionError {
    RegionError::io("cannot read a program's page table")(source)
}
