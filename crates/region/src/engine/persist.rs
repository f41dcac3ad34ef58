//! Having lenders have all that is here.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::PAGE_SIZE;

use super::Engine;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::program::Program;
use crate::table::{Page, Place};

/// Pages that are looked at together, and written together if they are dirty.
const CHUNK: u64 = 256;

/// Pages that are being written back while programs have them: they are leaving as far as the table says, so that nobody else writes or
/// takes them.
struct Taken {
    pages: Vec<u64>,
    /// What each was.
    were: Vec<Page>,
    /// Who may write to them.
    programs: Vec<Arc<Program>>,
    /// How often programs had unmapped something.
    released: u64,
}

impl Engine {
    /// Writes what was written before this call and is only here to the volume. Programs go on meanwhile, and all stays in the cache. Says how
    /// many pages were dirty.
    ///
    /// # Errors
    /// When pages cannot be written; they stay, and are still dirty.
    pub fn persist(&self) -> Result<u64, RegionError> {
        let _looking = lock(&self.looking);
        let (mut written, mut next) = (0, 0);
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        while next < self.table.pages() {
            self.wait_until(Self::is_known)?;
            let chunk = next..(next + CHUNK).min(self.table.pages());
            let taken = self.take_dirty(chunk, &mut next)?;
            written += taken.pages.len() as u64;
            self.write_taken(taken, &mut buffer)?;
        }
        self.volume.flush(self.control_worker())?;
        Ok(written)
    }

    /// The dirty ones of the pages, as leaving. Where one is under way, those before it, and `next` is that.
    fn take_dirty(&self, chunk: Range<u64>, next: &mut u64) -> Result<Taken, RegionError> {
        let mut cache = lock(&self.cache);
        self.may_change()?;
        let released = self.released.load(Ordering::Relaxed);
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
                    if is.place == Place::Resident {
                        cache.policy.went(page);
                    }
                    self.table.set(page, is.at(Place::Leaving));
                    taken.pages.push(page);
                    taken.were.push(is);
                }
                _ => {}
            }
            *next = page + 1;
        }
        Ok(taken)
    }

    /// Writes them, and has them be where they were: clean, if nobody has written to them meanwhile.
    fn write_taken(&self, taken: Taken, buffer: &mut [u8]) -> Result<(), RegionError> {
        let Taken { pages, were, programs, released } = taken;
        if pages.is_empty() {
            return Ok(());
        }
        let read = pages
            .iter()
            .zip(&were)
            .zip(buffer.chunks_exact_mut(PAGE_SIZE))
            .try_for_each(|((page, was), into)| self.read_here(*page, *was, into));
        // Runs of pages are runs in the buffer.
        let content = |run: &Range<u64>| {
            let at = pages.partition_point(|page| *page < run.start) * PAGE_SIZE;
            &buffer[at..at + (run.end - run.start) as usize * PAGE_SIZE]
        };
        let (written, mut failed) = match read {
            Ok(()) => self.write_back(self.control_worker(), &pages, content),
            Err(error) => (Vec::new(), Some(cannot_look(error))),
        };
        let mut cache = lock(&self.cache);
        let here = self.programs();
        // A program that is gone, or new, or has unmapped some, has no marks that tell, and a device
        // makes none.
        let are_the_same = self.released.load(Ordering::Relaxed) == released
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
            // With nothing but zeroes in it, it is dirty still: the volume has nothing.
            let dirty = stored != Some(true) || again.contains(page);
            let is_stored = stored.unwrap_or(is.stored);
            self.table.set(*page, Page { stored: is_stored, dirty, wanted: false, ..was });
            match was.place {
                Place::Resident => cache.policy.came(*page),
                Place::Shared => {}
                _ => cache.cooling.push_back(*page),
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

pub(super) fn cannot_look(source: std::io::Error) -> RegionError {
    RegionError::io("cannot look at a program's pages")(source)
}
