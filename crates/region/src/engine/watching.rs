//! Regions that nobody watches yet.
//!
//! While all pages of a region fit into its cache, and none has left it, the engine has nothing to
//! do. Then programs map the region's file as any other file of a tmpfs: their faults are the
//! kernel's alone, and cost what they cost without Aquifer. Before the first page is to leave, each
//! program registers its mapping with its userfaultfd. The engine then learns from the file which
//! pages there are.
//!
//! The table says whether a region is watched: it is empty until then. A program that was away
//! meanwhile registers its mapping when it comes back. Until then no page leaves: the kernel would
//! give that program zeroes in the place of a page that is gone.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::{io, ops::Range};

use aquifer_page::PAGE_SIZE;

use super::Engine;
use crate::error::RegionError;
use crate::file::runs;
use crate::program::Program;
use crate::table::{Page, Place};
use crate::{effect, lock};

/// The number of pages learnt under one lock.
const CHUNK: u64 = 4096;

/// Whether the engine knows of the programs' faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Is {
    /// It does not.
    Unwatched,
    /// It orders each program to register its mapping.
    Begun,
    /// It does, and the table knows each page.
    Watched,
}

/// Whether the engine knows of the programs' faults, and the change.
#[derive(Debug)]
pub(super) struct Watching {
    is: RwLock<Is>,
    /// Held by the thread that makes the change.
    changing: Mutex<()>,
}

impl Watching {
    pub(super) fn new(unwatched: bool) -> Self {
        let is = if unwatched { Is::Unwatched } else { Is::Watched };
        Self { is: RwLock::new(is), changing: Mutex::default() }
    }

    /// Returns whether the engine knows of faults. It stays so while the result is held.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, Is> {
        self.is.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, is: Is, first: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.is.write().unwrap_or_else(PoisonError::into_inner);
        first()?;
        *state = is;
        Ok(())
    }
}

impl Engine {
    /// Begins to serve the faults of all programs, if nobody did before. A program that takes no
    /// orders follows when it comes back.
    ///
    /// # Errors
    /// A program cannot register its mapping, or the file cannot be read. The programs run on, no
    /// page leaves, and the caller may try again.
    pub fn watch(&self) -> Result<(), RegionError> {
        let _changing = lock(&self.watching.changing);
        if *self.watching.hold() == Is::Watched {
            return Ok(());
        }
        let fail = || RegionError::io("cannot begin to serve the faults of a program");
        // From here on each program that attaches is told to register first.
        self.watching.set(Is::Begun, || Ok(())).map_err(fail())?;
        for program in self.programs() {
            effect::at("watch");
            match program.watch() {
                Ok(()) => self.note_watched(&program).map_err(fail())?,
                // It attaches again, or has ended.
                Err(_) if program.is_silent() => {}
                Err(error) => return Err(fail()(error)),
            }
        }
        effect::at("watched");
        // No discard runs meanwhile: it would find a page that the table does not have yet.
        self.watching.set(Is::Watched, || self.learn_pages(false)).map_err(fail())?;
        Ok(())
    }

    pub(super) fn is_watched(&self) -> bool {
        *self.watching.hold() == Is::Watched
    }

    /// Returns whether some program may get pages from the kernel alone.
    pub(super) fn has_unwatched(&self) -> bool {
        self.programs().iter().any(|program| !program.is_watched())
            || lock(&self.programs.surviving).has_unwatched()
    }

    /// Notes the pages that an unwatched program left in the file of a watched region.
    pub(super) fn learn_of(&self, program: &Program) {
        if program.is_watched() || *self.watching.hold() != Is::Watched {
            return;
        }
        if let Err(error) = self.learn_pages(true) {
            tracing::error!("cannot learn which pages a program has left: {error}");
        }
    }

    fn note_watched(&self, program: &Program) -> io::Result<()> {
        let (pid, address) = (program.process.pid, program.mapping.address);
        lock(&self.programs.surviving).is_watched(pid, address)
    }

    /// Notes in the table the pages that programs got from the kernel: they are in the file alone.
    /// `changes` says that pages may leave the file meanwhile.
    pub(super) fn learn_pages(&self, changes: bool) -> io::Result<()> {
        for Range { mut start, end } in self.file.present()? {
            while start < end {
                let chunk = start..end.min(start + CHUNK);
                start = chunk.end;
                let mut cache = lock(&self.cache);
                for page in chunk {
                    let is = self.table.get(page);
                    let may_be_new = is.place == Place::Zero && !is.awaiting_source;
                    if may_be_new && (!changes || self.file.has(page)) {
                        self.table.set(page, Page { dirty: true, ..is.at(Place::Resident) });
                        cache.frames += 1;
                        cache.policy.came(page);
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns how many pages are in the file of a region that nobody watches.
    pub(super) fn unwatched_pages(&self) -> Option<u64> {
        if *self.watching.hold() == Is::Watched {
            return None;
        }
        let pages = self.file.allocated().ok()? / PAGE_SIZE as u64;
        Some(pages.min(self.table.pages()))
    }

    /// Removes pages that the table does not have from the file.
    pub(super) fn discard_unwatched(&self, pages: &Range<u64>) -> io::Result<()> {
        let watching = self.watching.hold();
        if *watching != Is::Watched {
            self.file.punch(pages)?;
            self.counters.discarded.fetch_add(pages.end - pages.start, Ordering::Relaxed);
        } else if self.has_unwatched() {
            let _cache = lock(&self.cache);
            let unknown = runs(pages.clone().filter(|page| self.is_nowhere(*page)));
            unknown.iter().try_for_each(|run| self.file.punch(run))?;
        }
        drop(watching);
        Ok(())
    }
}
