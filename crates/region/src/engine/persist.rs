//! Having lenders have all that is here.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::PAGE_SIZE;
use rustix::io::Errno;

use super::Engine;
use crate::error::RegionError;
use crate::lock;
use crate::program::Program;
use crate::table::{Page, Place};

/// Pages that are looked at together, and written together if they are dirty.
const CHUNK: u64 = 256;

/// How long it may take until it is noticed that a program has ended, and how often it is looked.
const ENDING: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// Pages that are being written back while programs have them: they are leaving as far as the table says, so that nobody else writes or
/// takes them.
struct Taken {
    pages: Vec<u64>,
    /// What each was.
    were: Vec<Page>,
    /// Who may write to them.
    programs: Vec<Arc<Program>>,
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
        let deadline = Instant::now() + ENDING;
        while next < self.table.pages() {
            if !self.is_complete() {
                self.wait_for_change(lock(&self.cache));
                continue;
            }
            let first = next;
            let chunk = next..(next + CHUNK).min(self.table.pages());
            let done = self.take_dirty(chunk, &mut next).and_then(|taken| {
                let pages = taken.pages.len() as u64;
                self.write_taken(taken, &mut buffer).map(|()| pages)
            });
            match done {
                Ok(pages) => written += pages,
                // Once it is noticed that the program is gone, its pages are looked at anew.
                Err(error) if is_ending(&error) && Instant::now() < deadline => {
                    next = first;
                    thread::sleep(LOOK);
                }
                Err(error) => return Err(error),
            }
        }
        self.volume.flush(self.control_worker())?;
        Ok(written)
    }

    /// Notes which pages that are here programs have written to, and has the next write be noticed. To be called under the lock of the cache:
    /// whoever has pages leave must not find them clean before it is noted that they are not.
    pub(super) fn note_dirty(&self, pages: &Range<u64>) -> Result<HashSet<u64>, RegionError> {
        let mut written = HashSet::new();
        for program in self.programs() {
            program.written(pages, true, &mut written).map_err(cannot_look)?;
        }
        written.retain(|page| {
            let is = self.table.get(*page);
            if is.has_frame() {
                self.table.set(*page, Page { dirty: true, ..is });
            }
            is.has_frame()
        });
        Ok(written)
    }

    /// The dirty ones of the pages, as leaving. Where one is under way, those before it, and `next` is that.
    fn take_dirty(&self, chunk: Range<u64>, next: &mut u64) -> Result<Taken, RegionError> {
        let mut cache = lock(&self.cache);
        self.may_change()?;
        let mut taken = Taken { pages: Vec::new(), were: Vec::new(), programs: self.programs() };
        self.note_dirty(&chunk)?;
        for page in chunk {
            let is = self.table.get(page);
            match is.place {
                Place::Filling | Place::Leaving if taken.pages.is_empty() => {
                    self.wait_for_change(cache);
                    return Ok(taken);
                }
                Place::Filling | Place::Leaving => return Ok(taken),
                Place::Resident | Place::Unmapped | Place::Shared if is.dirty || !is.stored => {
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
        let Taken { pages, were, programs } = taken;
        let Some((first, last)) = pages.first().copied().zip(pages.last().copied()) else { return Ok(()) };
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
        let mut again = HashSet::new();
        let here = self.programs();
        if programs.iter().any(|program| !here.iter().any(|other| Arc::ptr_eq(other, program))) {
            // What it had written to was known to its page table only.
            again.extend(&pages);
        }
        for program in here {
            if let Err(error) = program.written(&(first..last + 1), false, &mut again) {
                again.extend(&pages);
                failed = Some(cannot_look(error));
            }
        }
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

/// Whether a program could not be looked at because it is just ending.
fn is_ending(error: &RegionError) -> bool {
    matches!(error, RegionError::Io { source, .. } if source.raw_os_error() == Some(Errno::SRCH.raw_os_error()))
}

fn cannot_look(source: std::io::Error) -> RegionError {
    RegionError::io("cannot look at a program's pages")(source)
}
