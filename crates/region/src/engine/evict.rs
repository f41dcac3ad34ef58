//! Eviction: victims leave the page tables, and later the cache.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{PAGE_SIZE, WorkerId, is_zero};
use aquifer_volume::VolumeError;

use super::cache::Cache;
use super::placed::Places;
use super::{Engine, bytes};
use crate::counters::add;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// The pause before the next attempt after pages could not leave.
const PAUSE: Duration = Duration::from_millis(250);

/// The least number of pages to unmap, write and remove together. It amortizes the calls, and still
/// lets a fault meanwhile get a processor soon.
pub(super) const FEW: usize = 16;

/// The most pages to evict together, when pages are needed faster.
pub(super) const BATCH: usize = 64;

impl Engine {
    /// Signals the eviction thread if few frames are free and it is idle. Also signals the watcher.
    pub(super) fn see_to_room(&self, cache: &mut Cache) {
        if cache.shortage.watched && !cache.shortage.occurred && cache.free() <= cache.reserve() {
            cache.shortage.occurred = true;
            self.signals.watch.notify_one();
        }
        if !cache.making_room && cache.free() + (FEW as u64) < cache.reserve() {
            cache.making_room = true;
            self.signals.short.notify_one();
        }
    }

    /// Keeps frames free, until the engine ends.
    pub(super) fn keep_room(&self) {
        while !self.has_ended() {
            let mut cache = lock(&self.cache);
            cache.making_room = false;
            let enough = |cache: &mut Cache| {
                (self.is_frozen() || cache.free() + FEW as u64 >= cache.reserve())
                    && !self.has_ended()
            };
            let mut cache = self
                .signals
                .short
                .wait_while(cache, enough)
                .unwrap_or_else(PoisonError::into_inner);
            cache.making_room = true;
            let count = (cache.reserve().saturating_sub(cache.free()) as usize).clamp(FEW, BATCH);
            drop(cache);
            if self.has_ended() {
                return;
            }
            if let Err(error) = self.evict(WorkerId(self.faults.workers), count) {
                self.is_in_trouble(&error);
                thread::sleep(PAUSE);
            }
        }
    }

    /// Evicts this many pages, or fewer if fewer can leave.
    pub(super) fn evict(&self, worker: WorkerId, count: usize) -> Result<(), RegionError> {
        if self.is_frozen() {
            self.wait_for_change(lock(&self.cache));
            return Ok(());
        }
        self.watch_now()?;
        self.cool(count)?;
        let leaving = self.take_cooled(count);
        if leaving.is_empty() {
            // All pages are on their way.
            self.wait_for_change(lock(&self.cache));
            return Ok(());
        }
        match self.leave(worker, &leaving) {
            // Another thread has taken the last free slot, or a lender has just gone away. Pages
            // that have a place can still leave.
            Err(RegionError::Pool(error))
                if (matches!(error, VolumeError::NoRoom(_))
                    || error.is_unreachable()
                    || error.is_lost())
                    && self.placed(&mut lock(&self.cache), 0).is_some() =>
            {
                Ok(())
            }
            left => left,
        }
    }

    /// Unmaps victims, until there are enough to choose from.
    fn cool(&self, count: usize) -> Result<(), RegionError> {
        let mut cache = lock(&self.cache);
        // Checked under the lock: a freeze waits only for pages that were leaving when it began.
        if cache.cold_list.len() >= cache.cooled() + count || self.is_frozen() {
            return Ok(());
        }
        let most = count.max(FEW.min((cache.limit / 8) as usize));
        let mut victims = self.victims(&mut cache, most);
        let another_has_some = cache.outgoing.is_some();
        drop(cache);
        victims.sort_unstable();
        let held = self.held(&victims);
        let unmapped = held.and_then(|held| {
            self.put_back(&held, &mut victims);
            self.unmap(&victims, another_has_some)
        });
        let mut cache = lock(&self.cache);
        let mut wanted = Vec::new();
        for page in victims {
            let is = self.table.get(page);
            if is.wanted {
                wanted.push(page);
            }
            let is = Page { wanted: false, ..is };
            match &unmapped {
                Ok(unproven) => {
                    let dirty = is.dirty || unproven.contains(&page);
                    if let Some(outgoing) =
                        cache.outgoing.as_mut().filter(|_| unproven.contains(&page))
                    {
                        outgoing.changed(&[page]);
                    }
                    self.table.set(page, Page { dirty, ..is.at(Place::Unmapped) });
                    cache.cold_list.push_back(page);
                }
                Err(_) => {
                    self.table.set(page, is.at(Place::Resident));
                    cache.policy.came(page);
                }
            }
        }
        drop(cache);
        self.arrived(&wanted);
        unmapped.map(|_| ()).map_err(RegionError::io("cannot unmap pages from a program"))
    }

    /// Chooses at most this many victims, which are leaving then.
    fn victims(&self, cache: &mut Cache, most: usize) -> Vec<u64> {
        let is_mapped = !self.programs().is_empty();
        // A program may have the page mapped from a frame, so it stays until that is clear.
        let stays = |page| self.group.sharers.get(page).is_some() && is_mapped;
        let offered = |cache: &mut Cache, mut places: Places| {
            let (mut victims, mut skipped) = (Vec::with_capacity(most), Vec::new());
            while victims.len() < most && skipped.len() < places.looks(most) {
                let Some(page) = cache.policy.victim() else { break };
                if self.table.get(page).place != Place::Resident {
                    continue;
                }
                let goes = !stays(page) && self.has_place(&mut places, page);
                if goes { victims.push(page) } else { skipped.push(page) }
            }
            skipped.into_iter().for_each(|page| cache.policy.came(page));
            victims
        };
        let places = self.places();
        let are_few = places.are_few();
        let mut victims = offered(cache, places);
        if victims.is_empty() && are_few {
            victims = match self.placed(cache, most) {
                Some(placed) => placed.into_iter().filter(|page| !stays(*page)).collect(),
                // An attempt tells why no page can leave.
                None => offered(cache, Places::for_all()),
            };
            victims.iter().for_each(|page| cache.policy.went(*page));
        }
        self.begin_to_leave(&victims);
        victims
    }

    fn begin_to_leave(&self, victims: &[u64]) {
        for page in victims {
            self.group.sharers.set(*page, None);
            self.table.set(*page, self.table.get(*page).at(Place::Leaving));
        }
    }

    /// Puts back the victims that silent programs hold. While there are some, other programs may
    /// take a few frames beyond the limit, so that they are served.
    fn put_back(&self, held: &HashSet<u64>, victims: &mut Vec<u64>) {
        let mut cache = lock(&self.cache);
        if self.is_complete_now(&mut cache) {
            cache.beyond = 0;
        } else if !held.is_empty() && cache.beyond == 0 {
            // The silent programs may hold more than the limit, which may be smaller since.
            cache.beyond = cache.frames.saturating_sub(cache.limit) + Self::LEAST_FRAMES;
        }
        let mut wanted = Vec::new();
        for page in victims.extract_if(.., |page| held.contains(page)) {
            let is = self.table.get(page);
            if is.wanted {
                wanted.push(page);
            }
            self.table.set(page, Page { wanted: false, ..is.at(Place::Resident) });
            cache.policy.came(page);
        }
        drop(cache);
        self.arrived(&wanted);
    }

    /// Returns the leaving pages that programs without orders have in their page tables. Such
    /// programs are silent, or have not reconnected since the last engine.
    ///
    /// A page that such a program lacks now it will not get, as no page on its way enters a page
    /// table.
    fn held(&self, pages: &[u64]) -> io::Result<HashSet<u64>> {
        let mut held = HashSet::new();
        if self.is_complete() {
            return Ok(held);
        }
        let runs = runs(pages.iter().copied());
        for program in self.programs().iter().filter(|program| program.is_silent()) {
            program.mapping.present(&runs, &mut held)?;
        }
        if !lock(&self.programs.surviving).add_present(&runs, &mut held) {
            held.extend(pages);
        }
        Ok(held)
    }

    /// Takes leaving pages out of all page tables. Returns the pages that programs may have written
    /// to since their marks were armed.
    ///
    /// Pages that the table knows as dirty are included only if `another_has_some`, as the
    /// destination's engine may have an older version of them.
    pub(super) fn unmap(&self, pages: &[u64], another_has_some: bool) -> io::Result<HashSet<u64>> {
        let all = runs(pages.iter().copied());
        for program in self.programs().iter().filter(|program| !program.is_silent()) {
            match program.unmap(&all) {
                // The check below looks at its page table.
                Err(_) if program.is_silent() => {}
                unmapped => unmapped?,
            }
        }
        // A program that has just become silent may have some of the pages in its page table.
        if !self.held(pages)?.is_empty() {
            return Err(io::Error::other(self.describe_wait()));
        }
        let maybe_clean = |page: &u64| !self.table.get(*page).is_known_dirty() || another_has_some;
        let maybe_clean = runs(pages.iter().copied().filter(maybe_clean));
        // No program can write to the pages any more.
        self.unproven(&mut lock(&self.cache), &maybe_clean)
    }

    /// Takes the oldest victims that were not touched again. Those that would find no place stay,
    /// unless no page of the cache has one: then an attempt tells why.
    fn take_cooled(&self, count: usize) -> Vec<u64> {
        let mut cache = lock(&self.cache);
        let mut leaving = Vec::with_capacity(count);
        let mut places = self.places();
        let may_stay = places.are_few() && self.placed(&mut cache, 0).is_some();
        while leaving.len() < count && !self.is_frozen() {
            let Some(page) = cache.cold_list.pop_front() else { break };
            let is = self.table.get(page);
            if is.place != Place::Unmapped {
                continue;
            }
            if may_stay && !self.has_place(&mut places, page) {
                // No program has it in a page table, and a victim need not be in one.
                self.table.set(page, is.at(Place::Resident));
                cache.policy.came(page);
                continue;
            }
            self.take(&mut cache, page, is, Place::Leaving);
            leaving.push(page);
        }
        leaving.sort_unstable();
        leaving
    }

    /// Writes the dirty pages to the volume, and removes all from the file, except pages that are
    /// wanted again.
    pub(super) fn leave(&self, worker: WorkerId, pages: &[u64]) -> Result<(), RegionError> {
        // None of the pages is in a page table, so no thread can pin one from here on.
        if let Some(pinned) = self.pinned_by() {
            self.stay(pages);
            return Err(pinned);
        }
        // Asked once. A program that ends now makes all pages dirty that it may have mapped, but
        // these were judged when they left its page table.
        let is_dirty = |page: &u64| self.table.get(*page).is_known_dirty();
        let dirty: Vec<_> = pages.iter().copied().filter(is_dirty).collect();
        let mut buffer = vec![0; dirty.len() * PAGE_SIZE];
        if let Err(error) = self.file.read_pages(&dirty, &mut buffer) {
            self.stay(pages);
            return Err(RegionError::io("cannot read the region's file")(error));
        }
        let content = |run: &Range<u64>| part_of(&dirty, &buffer, run);
        let (written, mut failed) = self.write_back(worker, pages, &dirty, content);
        self.note_written(&written);
        let goes = |(page, stored): &(u64, Option<bool>)| {
            stored.is_some() && !self.table.get(*page).wanted
        };
        let (going, staying): (Vec<_>, Vec<_>) = written.into_iter().partition(goes);
        let pages =
            |written: Vec<(u64, _)>| written.into_iter().map(|(page, _)| page).collect::<Vec<_>>();
        let (going, mut staying) = (pages(going), pages(staying));
        let (gone, stuck) = self.punch(&going);
        add(&self.counters.evicted, gone.len());
        self.were_let_go(gone);
        self.complete_removal(gone, gone.len());
        if let Some((pages, error)) = stuck {
            failed = Some(error);
            staying.extend(pages);
        }
        self.stay(&staying);
        failed.map_or(Ok(()), Err)
    }

    /// Records whether the volume has the pages, by the result of [`write_back`](Self::write_back).
    fn note_written(&self, written: &[(u64, Option<bool>)]) {
        let _cache = lock(&self.cache);
        for (page, stored) in written {
            if let Some(stored) = *stored {
                let is = self.table.get(*page);
                self.table.set(*page, Page { stored, dirty: false, ..is });
            }
        }
    }

    /// Removes pages, in ascending order, from the file. Returns the removed pages, and the others
    /// with the error.
    pub(super) fn punch<'a>(
        &self,
        pages: &'a [u64],
    ) -> (&'a [u64], Option<(&'a [u64], RegionError)>) {
        let mut gone = 0;
        for run in runs(pages.iter().copied()) {
            if let Err(error) = self.file.remove(&run) {
                let error = RegionError::io("cannot remove pages from the region's file")(error);
                return (&pages[..gone], Some((&pages[gone..], error)));
            }
            gone += (run.end - run.start) as usize;
        }
        (pages, None)
    }

    /// Puts leaving pages back: they stay in the file.
    pub(super) fn stay(&self, pages: &[u64]) {
        let mut cache = lock(&self.cache);
        let wanted = pages.iter().copied().filter(|page| {
            let is = self.table.get(*page);
            // A page of zeroes is dirty again, as the volume does not have it.
            let dirty = is.is_known_dirty();
            self.table.set(*page, Page { dirty, wanted: false, ..is.at(Place::Unmapped) });
            cache.cold_list.push_back(*page);
            is.wanted
        });
        let wanted: Vec<_> = wanted.collect();
        drop(cache);
        self.arrived(&wanted);
    }

    /// Completes the removal of leaving pages from the file, where they took this many frames.
    pub(super) fn complete_removal(&self, pages: &[u64], frames: usize) {
        let mut cache = lock(&self.cache);
        let wanted = pages.iter().copied().filter(|page| {
            let is = self.table.get(*page);
            self.table.set(*page, is.without_frame());
            is.wanted
        });
        let wanted: Vec<_> = wanted.collect();
        cache.outgoing.iter_mut().for_each(|outgoing| outgoing.changed(pages));
        cache.frames -= frames as u64;
        drop(cache);
        self.arrived(&wanted);
    }

    /// Makes the volume agree with the pages, of which these are `dirty`. `content` returns the
    /// bytes of a run of dirty pages. Zero pages are discarded in the volume.
    ///
    /// Returns for each page whether the volume has it now, or `None` if the write failed.
    pub(super) fn write_back<'a>(
        &self,
        worker: WorkerId,
        pages: &[u64],
        dirty: &[u64],
        content: impl Fn(&Range<u64>) -> &'a [u8],
    ) -> (Vec<(u64, Option<bool>)>, Option<RegionError>) {
        let is_full = |page: &u64| !is_zero(content(&(*page..*page + 1)));
        let clean = pages.iter().filter(|page| dirty.binary_search(page).is_err());
        let mut written: Vec<_> = clean.map(|page| (*page, Some(true))).collect();
        let (full, empty): (Vec<_>, Vec<_>) = dirty.iter().copied().partition(is_full);
        let mut failed = None;
        let full_runs = runs(full.iter().copied());
        let data: Vec<_> = full_runs.iter().map(|run| (bytes(run).start, content(run))).collect();
        let sent = Instant::now();
        let stored = self
            .lenders
            .volume
            .write_many(worker, &data)
            .map_err(|error| failed = Some(error.into()))
            .is_ok();
        if let Some(link) = self.lenders.link.as_ref().filter(|_| !full.is_empty()) {
            link.carry(full.len(), sent);
        }
        add(&self.counters.written_back, if stored { full.len() } else { 0 });
        written.extend(full.iter().map(|page| (*page, stored.then_some(true))));
        for run in runs(empty.iter().copied()) {
            let Range { start, end } = bytes(&run);
            let gone = self.lenders.volume.discard(worker, start, end - start);
            let gone = gone.map_err(|error| failed = Some(error.into())).is_ok();
            add(&self.counters.found_zero, if gone { (run.end - run.start) as usize } else { 0 });
            written.extend(run.map(|page| (page, gone.then_some(false))));
        }
        written.sort_unstable();
        (written, failed)
    }
}

/// Returns the bytes of a run of these pages, which are in ascending order in `bytes`.
pub(super) fn part_of<'a>(pages: &[u64], bytes: &'a [u8], run: &Range<u64>) -> &'a [u8] {
    let at = pages.partition_point(|page| *page < run.start) * PAGE_SIZE;
    &bytes[at..at + (run.end - run.start) as usize * PAGE_SIZE]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn a_page_marked_while_it_leaves_is_not_written() {
        let engine = Engine::bare(10);
        let is = |dirty| Page {
            place: Place::Leaving,
            stored: true,
            dirty,
            wanted: false,
            awaiting_source: false,
        };
        [5, 7, 9].iter().for_each(|page| engine.table.set(*page, is(*page != 7)));
        let dirty = [5, 9];
        // A program that had the page mapped before ends now.
        engine.lose_marks(&mut lock(&engine.cache));
        assert!(engine.table.get(7).dirty);
        let zeroes = [0; 2 * PAGE_SIZE];
        let content = |run: &Range<u64>| {
            assert!(dirty.contains(&run.start), "nobody has read page {}", run.start);
            part_of(&dirty, &zeroes, run)
        };
        let (written, failed) = engine.write_back(WorkerId(0), &[5, 7, 9], &dirty, content);
        assert!(failed.is_none());
        assert_eq!(written, [(5, Some(false)), (7, Some(true)), (9, Some(false))]);
    }
}
