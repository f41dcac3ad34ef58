//! Regions that nobody watches yet.
//!
//! While all pages of a region fit into its cache, and none has left it, the engine has nothing to
//! do. Then programs map the region's file as any other file of a tmpfs: their faults are the
//! kernel's alone, and cost what they cost without Aquifer. Before the first page is to leave, each
//! program registers its mapping with its userfaultfd. The engine then learns from the file which
//! pages there are.
//!
//! A file beside the region says whether it is watched. No page leaves before that: the kernel
//! would give a program that is away zeroes in the place of a page that is gone.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

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
    /// It does, the table knows each page, and each page is in a folio of its own.
    Watched,
}

/// Whether the engine knows of the programs' faults, and the change.
#[derive(Debug)]
pub(super) struct Watching {
    is: RwLock<Is>,
    /// Held by the thread that makes the change.
    changing: Mutex<()>,
    /// The path of the file that says that the region is watched.
    record: PathBuf,
}

impl Watching {
    /// Finds out whether an earlier engine watched the region. `always` says that the region was
    /// watched from its beginning; `is_new` says that no engine has done anything with it yet.
    pub(super) fn open(record: PathBuf, always: bool, is_new: bool) -> io::Result<Self> {
        let is = if always || record.exists() {
            Is::Watched
        } else if is_new {
            Is::Unwatched
        } else {
            Is::Begun
        };
        let watching = Self { is: RwLock::new(is), changing: Mutex::default(), record };
        if is == Is::Watched {
            watching.record()?;
        }
        Ok(watching)
    }

    fn record(&self) -> io::Result<()> {
        File::create(&self.record).map(drop)
    }

    /// Returns whether the engine knows of faults. It stays so while the result is held.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, Is> {
        self.is.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps discards from pages that the table does not have, while the result is held.
    pub(super) fn stop_discards(&self) -> impl Sized + '_ {
        self.is.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, is: Is, first: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.is.write().unwrap_or_else(PoisonError::into_inner);
        first()?;
        *state = is;
        Ok(())
    }
}

impl Engine {
    /// Begins to serve the faults of all programs, if nobody did before. Waits for programs that
    /// are away for a limited time. A thread that serves a fault must not call it.
    ///
    /// # Errors
    /// A program cannot register its mapping or is away, the file cannot be read, or a huge page
    /// cannot be split. The programs run on, no page leaves, and the caller may try again.
    pub fn watch(&self) -> Result<(), RegionError> {
        match self.watch_now() {
            Err(RegionError::Refused(_)) => {
                self.wait_until(|engine| !engine.has_unwatched())?;
                self.watch_now()
            }
            watched => watched,
        }
    }

    /// Does the same, but waits for no program that is away.
    pub(crate) fn watch_now(&self) -> Result<(), RegionError> {
        if self.is_watched() {
            return Ok(());
        }
        let _changing = lock(&self.watching.changing);
        if self.is_watched() {
            return Ok(());
        }
        let fail = || RegionError::io("cannot begin to serve the faults of a program");
        // From here on each program that attaches is told to register first.
        self.watching.set(Is::Begun, || Ok(())).map_err(fail())?;
        for program in self.programs().iter().filter(|program| !program.is_watched()) {
            effect::at("watch");
            match program.watch() {
                Ok(()) => self.note_watched(program).map_err(fail())?,
                Err(_) if program.is_silent() => {}
                Err(error) => return Err(fail()(error)),
            }
        }
        effect::at("watched");
        if self.has_unwatched() {
            return Err(RegionError::Refused(self.describe_wait()));
        }
        self.split_folios().map_err(fail())?;
        effect::at("split");
        // No discard runs meanwhile: it would find a page that the table does not have yet.
        let complete = || {
            self.learn_pages()?;
            effect::at("learnt");
            self.watching.record()
        };
        self.watching.set(Is::Watched, complete).map_err(fail())
    }

    pub(super) fn is_watched(&self) -> bool {
        *self.watching.hold() == Is::Watched
    }

    /// Returns whether some program may get pages from the kernel alone.
    fn has_unwatched(&self) -> bool {
        // Forgets the programs that have ended.
        self.is_known();
        self.programs().iter().any(|program| !program.is_watched())
            || lock(&self.programs.surviving).has_unwatched()
    }

    fn note_watched(&self, program: &Program) -> io::Result<()> {
        let (pid, address) = (program.process.pid, program.mapping.address);
        lock(&self.programs.surviving).is_watched(pid, address)
    }

    /// Notes in the table the pages that programs got from the kernel: they are in the file alone.
    fn learn_pages(&self) -> io::Result<()> {
        for Range { mut start, end } in self.file.present()? {
            while start < end {
                let chunk = start..end.min(start + CHUNK);
                start = chunk.end;
                let mut cache = lock(&self.cache);
                for page in chunk {
                    let is = self.table.get(page);
                    let is_new = is.place == Place::Zero && !is.awaiting_source;
                    // A discard that had begun earlier may have removed it since.
                    if is_new && self.file.has(page) {
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

    /// Removes pages that the table does not have from the file. A huge page that the kernel cannot
    /// split stays, with zeroes in their place.
    pub(super) fn discard_unwatched(&self, pages: &Range<u64>) -> io::Result<()> {
        let watching = self.watching.hold();
        match *watching {
            Is::Watched => {}
            Is::Unwatched => self.punch_unknown(pages)?,
            // The table has the pages of programs that have registered already.
            Is::Begun => {
                for start in pages.clone().step_by(CHUNK as usize) {
                    let chunk = start..pages.end.min(start + CHUNK);
                    let _cache = lock(&self.cache);
                    let unknown = runs(chunk.filter(|page| self.is_nowhere(*page)));
                    unknown.iter().try_for_each(|run| self.punch_unknown(run))?;
                }
            }
        }
        drop(watching);
        Ok(())
    }

    fn punch_unknown(&self, pages: &Range<u64>) -> io::Result<()> {
        self.file.punch(pages)?;
        self.counters.discarded.fetch_add(pages.end - pages.start, Ordering::Relaxed);
        Ok(())
    }
}
