//! Making room: victims are taken out of the page tables, and after a while out of the cache.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use aquifer_page::{PAGE_SIZE, is_zero};

use super::{Cache, Engine, Scheme, bytes};
use crate::counters::add;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// Pages that are unmapped, written and taken out together: enough that what a call costs does not matter.
pub(super) const BATCH: usize = 64;

impl Cache {
    fn free(&self) -> u64 {
        self.limit.saturating_sub(self.frames)
    }

    /// Frames that are kept free for faults to come.
    fn reserve(&self) -> u64 {
        (self.limit / 16).min(4 * BATCH as u64)
    }

    /// Victims that stay in the cache for a while, so that a touch is seen.
    fn cooled(&self) -> usize {
        if self.policy.looks_twice() { (self.limit / 16).min(16 * BATCH as u64) as usize } else { 0 }
    }
}

impl Engine {
    /// How many pages a fault that finds no frame has leave.
    pub(super) fn evicted_at_once(&self) -> usize {
        match self.scheme {
            Scheme::OnDemand => 1,
            Scheme::PreEvict => BATCH / 4,
        }
    }

    /// Whether pages should leave before they must.
    pub(super) fn is_short(&self, cache: &Cache) -> bool {
        match self.scheme {
            Scheme::OnDemand => cache.frames > cache.limit,
            Scheme::PreEvict => cache.free() < cache.reserve() / 2,
        }
    }

    /// Keeps frames free, until the end.
    pub(super) fn keep_room(&self) {
        let worker = self.workers;
        while !self.has_ended() {
            let cache = lock(&self.cache);
            if !self.is_short(&cache) {
                // Whoever makes it short says so; the look after a while is for the end only.
                let timeout = Duration::from_millis(200);
                drop(self.short.wait_timeout(cache, timeout).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            let reserve = cache.reserve();
            drop(cache);
            while !self.has_ended() && lock(&self.cache).free() < reserve {
                if let Err(error) = self.evict(worker, BATCH) {
                    tracing::warn!("the local cache is full and nothing can leave it: {error}");
                    std::thread::sleep(Duration::from_millis(250));
                }
            }
        }
    }

    /// Has so many pages leave the cache, or fewer where there are not so many that can.
    pub(super) fn evict(&self, worker: usize, count: usize) -> Result<(), RegionError> {
        if !self.is_complete() {
            self.wait_for_change(lock(&self.cache));
            return Ok(());
        }
        self.cool(count)?;
        let leaving = self.take_cooled(count);
        if leaving.is_empty() {
            // All is under way.
            self.wait_for_change(lock(&self.cache));
            return Ok(());
        }
        self.leave(worker, &leaving)
    }

    /// Takes victims out of the page tables, until there are enough of them to choose from.
    fn cool(&self, count: usize) -> Result<(), RegionError> {
        let mut cache = lock(&self.cache);
        if cache.cooling.len() >= cache.cooled() + count {
            return Ok(());
        }
        let most = BATCH.min((cache.limit / 8) as usize).max(count);
        let mut victims = Vec::with_capacity(most);
        while victims.len() < most {
            let Some(page) = cache.policy.victim() else { break };
            let is = self.table.get(page);
            if is.place == Place::Resident {
                self.table.set(page, is.at(Place::Leaving));
                victims.push(page);
            }
        }
        drop(cache);
        victims.sort_unstable();
        let unmapped = self.unmap(&victims);
        let mut cache = lock(&self.cache);
        let mut wanted = Vec::new();
        for page in victims {
            let is = self.table.get(page);
            if is.wanted {
                wanted.push(page);
            }
            let is = Page { wanted: false, ..is };
            match &unmapped {
                Ok(clean) => {
                    let dirty = is.dirty || !clean.contains(&page);
                    self.table.set(page, Page { dirty, ..is.at(Place::Unmapped) });
                    cache.cooling.push_back(page);
                }
                Err(_) => {
                    self.table.set(page, is.at(Place::Resident));
                    cache.policy.came(page);
                }
            }
        }
        drop(cache);
        self.wake(&wanted);
        self.settled.notify_all();
        unmapped.map(|_| ()).map_err(RegionError::io("cannot take pages out of a program"))
    }

    /// Takes pages out of all page tables. Says which of them no program has written to since they were fetched.
    fn unmap(&self, pages: &[u64]) -> io::Result<HashSet<u64>> {
        let all = runs(pages.iter().copied());
        let maybe_clean = runs(pages.iter().copied().filter(|page| {
            let is = self.table.get(*page);
            is.stored && !is.dirty
        }));
        let mut clean: Option<HashSet<u64>> = None;
        for program in self.programs() {
            program.unmap(&all)?;
            let mut unwritten = HashSet::new();
            program.unwritten(&maybe_clean, &mut unwritten)?;
            clean = Some(match clean {
                Some(before) => before.intersection(&unwritten).copied().collect(),
                None => unwritten,
            });
        }
        Ok(clean.unwrap_or_default())
    }

    /// The oldest victims that were not touched.
    fn take_cooled(&self, count: usize) -> Vec<u64> {
        let mut cache = lock(&self.cache);
        let mut leaving = Vec::with_capacity(count);
        while leaving.len() < count {
            let Some(page) = cache.cooling.pop_front() else { break };
            let is = self.table.get(page);
            if is.place == Place::Unmapped {
                self.table.set(page, is.at(Place::Leaving));
                leaving.push(page);
            }
        }
        leaving.sort_unstable();
        leaving
    }

    /// Writes what is dirty to the volume and takes all out of the file, but what is wanted back meanwhile.
    fn leave(&self, worker: usize, pages: &[u64]) -> Result<(), RegionError> {
        let (kept, failed) = self.write_back(worker, pages);
        let mut cache = lock(&self.cache);
        let (mut going, mut wanted) = (Vec::new(), Vec::new());
        for (page, stored) in kept {
            let is = self.table.get(page);
            let is = match stored {
                Some(stored) => Page { stored, dirty: false, ..is },
                None => is,
            };
            if is.wanted || stored.is_none() {
                // It stays. With nothing but zeroes in it, it is dirty again: the volume has nothing.
                let dirty = is.dirty || !is.stored;
                self.table.set(page, Page { dirty, wanted: false, ..is.at(Place::Unmapped) });
                cache.cooling.push_back(page);
                if is.wanted {
                    wanted.push(page);
                }
            } else {
                self.table.set(page, is);
                going.push(page);
            }
        }
        drop(cache);
        for run in runs(going.iter().copied()) {
            self.file.punch(&run).map_err(RegionError::io("cannot take pages out of the region's file"))?;
        }
        let mut cache = lock(&self.cache);
        for page in &going {
            let is = self.table.get(*page);
            if is.wanted {
                wanted.push(*page);
            }
            self.table.set(*page, is.without_frame());
        }
        cache.frames -= going.len() as u64;
        drop(cache);
        add(&self.counters.evicted, going.len());
        self.wake(&wanted);
        self.settled.notify_all();
        failed.map_or(Ok(()), Err)
    }

    /// Sees to it that the volume has the pages. Says of each whether it has now, or that it could not be written.
    fn write_back(&self, worker: usize, pages: &[u64]) -> (Vec<(u64, Option<bool>)>, Option<RegionError>) {
        let mut kept: Vec<_> = pages.iter().map(|page| (*page, Some(self.table.get(*page).stored))).collect();
        let mut failed = None;
        let is_dirty = |page: &u64| {
            let is = self.table.get(*page);
            is.dirty || !is.stored
        };
        let is_full = |page: &u64| !is_zero(self.file.frozen(&(*page..*page + 1)));
        let (full, empty): (Vec<_>, Vec<_>) = pages.iter().copied().filter(is_dirty).partition(is_full);
        let mut note = |run: &Range<u64>, result: Result<(), aquifer_pool::PoolError>, stored| {
            let result = match result {
                Ok(()) => Some(stored),
                Err(error) => {
                    failed = Some(error.into());
                    None
                }
            };
            for (_, kept) in kept.iter_mut().filter(|(page, _)| run.contains(page)) {
                *kept = result;
            }
        };
        for run in runs(full.iter().copied()) {
            let data = self.file.frozen(&run);
            note(&run, self.volume.write(worker, run.start * PAGE_SIZE as u64, data), true);
        }
        for run in runs(empty.iter().copied()) {
            let bytes = bytes(&run);
            note(&run, self.volume.discard(worker, bytes.start, bytes.end - bytes.start), false);
        }
        add(&self.counters.written_back, full.len());
        add(&self.counters.found_zero, empty.len());
        (kept, failed)
    }
}
