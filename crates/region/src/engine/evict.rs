//! Making room: victims are taken out of the page tables, and after a while out of the cache.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::is_zero;

use super::{Cache, Engine, Scheme, bytes};
use crate::counters::add;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// How long it is waited before pages that could not leave are tried again.
const PAUSE: Duration = Duration::from_millis(250);

/// Pages that are unmapped, written and taken out together at least: enough that what a call costs matters little, and few enough that a fault
/// that comes meanwhile need not wait for a processor for long.
const FEW: usize = 16;

/// The same at most, where pages are needed faster.
pub(super) const BATCH: usize = 64;

impl Cache {
    pub(super) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.frames)
    }

    /// Whether a page that is touched may have a frame.
    pub(super) fn has_room(&self) -> bool {
        self.frames < self.limit + self.beyond
    }

    /// Frames that are kept free for faults to come.
    pub(super) fn reserve(&self) -> u64 {
        match self.scheme {
            Scheme::OnDemand => 0,
            Scheme::PreEvict => (self.limit / 16).min(4 * BATCH as u64),
        }
    }

    /// How many pages a fault that finds no frame has leave: what it cannot do without, or some for those that come after it.
    pub(super) fn evicted_at_once(&self) -> usize {
        match self.scheme {
            Scheme::OnDemand => 1,
            Scheme::PreEvict => FEW,
        }
    }

    /// Victims that stay in the cache for a while, so that a touch is seen.
    fn cooled(&self) -> usize {
        if self.policy.looks_twice() { (self.limit / 16) as usize } else { 0 }
    }
}

impl Engine {
    /// Has pages leave before they must, if there are few free frames and nobody sees to it yet.
    pub(super) fn see_to_room(&self, cache: &mut Cache) {
        if cache.watched && !cache.is_short && cache.free() <= cache.reserve() {
            cache.is_short = true;
            self.watch.notify_one();
        }
        if !cache.making_room && cache.free() + (FEW as u64) < cache.reserve() {
            cache.making_room = true;
            self.short.notify_one();
        }
    }

    /// Keeps frames free, until the end.
    pub(super) fn keep_room(&self) {
        while !self.has_ended() {
            let mut cache = lock(&self.cache);
            cache.making_room = false;
            let enough = |cache: &mut Cache| {
                (self.is_frozen() || cache.free() + FEW as u64 >= cache.reserve())
                    && !self.has_ended()
            };
            let mut cache =
                self.short.wait_while(cache, enough).unwrap_or_else(PoisonError::into_inner);
            cache.making_room = true;
            let count = (cache.reserve().saturating_sub(cache.free()) as usize).clamp(FEW, BATCH);
            drop(cache);
            if self.has_ended() {
                return;
            }
            if let Err(error) = self.evict(self.workers, count) {
                self.is_in_trouble(&error);
                thread::sleep(PAUSE);
            }
        }
    }

    /// Has so many pages leave the cache, or fewer where there are not so many that can.
    pub(super) fn evict(&self, worker: usize, count: usize) -> Result<(), RegionError> {
        if self.is_frozen() {
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
        // Looked at under the lock: whoever freezes it waits for what is leaving then, and no more.
        if cache.cooling.len() >= cache.cooled() + count || self.is_frozen() {
            return Ok(());
        }
        let most = count.max(FEW.min((cache.limit / 8) as usize));
        let (mut victims, mut spared) = (Vec::with_capacity(most), Vec::new());
        let is_mapped = !self.programs().is_empty();
        while victims.len() < most {
            let Some(page) = cache.policy.victim() else { break };
            let is = self.table.get(page);
            if is.place != Place::Resident {
                continue;
            }
            // One that a program may have mapped otherwise stays until it has not.
            if self.sharers.get(page).is_some() && is_mapped {
                spared.push(page);
                continue;
            }
            self.sharers.set(page, None);
            self.table.set(page, is.at(Place::Leaving));
            victims.push(page);
        }
        spared.into_iter().for_each(|page| cache.policy.came(page));
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
                    cache.cooling.push_back(page);
                }
                Err(_) => {
                    self.table.set(page, is.at(Place::Resident));
                    cache.policy.came(page);
                }
            }
        }
        drop(cache);
        self.arrived(&wanted);
        unmapped.map(|_| ()).map_err(RegionError::io("cannot take pages out of a program"))
    }

    /// Puts those of the victims back that programs hold which take no orders. While there are such, others may have a few frames beyond the
    /// limit, so that they are served.
    fn put_back(&self, held: &HashSet<u64>, victims: &mut Vec<u64>) {
        let mut cache = lock(&self.cache);
        if self.is_complete_now(&mut cache) {
            cache.beyond = 0;
        } else if !held.is_empty() && cache.beyond == 0 {
            // They may hold more than the limit, which may be smaller now.
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

    /// Those of the pages, which are on their way out, that programs have in their page tables which take no orders: they are silent, or not
    /// back since an engine ended. (What such a program does not have now it will not have: no page that is on its way comes into a page
    /// table.)
    fn held(&self, pages: &[u64]) -> io::Result<HashSet<u64>> {
        let mut held = HashSet::new();
        if self.is_complete() {
            return Ok(held);
        }
        let runs = runs(pages.iter().copied());
        for program in self.programs().iter().filter(|program| program.is_silent()) {
            program.present(&runs, &mut held)?;
        }
        if !lock(&self.expected).add_present(&runs, &mut held) {
            held.extend(pages);
        }
        Ok(held)
    }

    /// Takes pages, which are on their way out, out of all page tables. Says which of them programs may have written to since their
    /// marks were armed. Pages that the table knows as dirty count only if `another_has_some`:
    /// another host's engine to which they were sent.
    pub(super) fn unmap(&self, pages: &[u64], another_has_some: bool) -> io::Result<HashSet<u64>> {
        let all = runs(pages.iter().copied());
        for program in self.programs().iter().filter(|program| !program.is_silent()) {
            match program.unmap(&all) {
                // What it has in its page table is looked at.
                Err(_) if program.is_silent() => {}
                unmapped => unmapped?,
            }
        }
        // Who has fallen silent just now may have some in its page table.
        if !self.held(pages)?.is_empty() {
            return Err(io::Error::other(self.who_is_away()));
        }
        let maybe_clean = |page: &u64| !self.table.get(*page).is_known_dirty() || another_has_some;
        let maybe_clean = runs(pages.iter().copied().filter(maybe_clean));
        // Nobody can write to them any more.
        self.unproven(&mut lock(&self.cache), &maybe_clean)
    }

    /// The oldest victims that were not touched.
    fn take_cooled(&self, count: usize) -> Vec<u64> {
        let mut cache = lock(&self.cache);
        let mut leaving = Vec::with_capacity(count);
        while leaving.len() < count && !self.is_frozen() {
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
    pub(super) fn leave(&self, worker: usize, pages: &[u64]) -> Result<(), RegionError> {
        // None is in a page table, so nobody can pin one of them after this.
        if let Some(pinned) = self.pinned_by() {
            self.stay(pages);
            return Err(pinned);
        }
        let (written, mut failed) = self.write_back(worker, pages, |run| self.file.frozen(run));
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
        self.have_left(gone, gone.len());
        if let Some((pages, error)) = stuck {
            failed = Some(error);
            staying.extend(pages);
        }
        self.stay(&staying);
        failed.map_or(Ok(()), Err)
    }

    /// Notes what the volume has now, as [`write_back`](Self::write_back) says.
    fn note_written(&self, written: &[(u64, Option<bool>)]) {
        let _cache = lock(&self.cache);
        for (page, stored) in written {
            if let Some(stored) = *stored {
                let is = self.table.get(*page);
                self.table.set(*page, Page { stored, dirty: false, ..is });
            }
        }
    }

    /// Takes pages, in ascending order, out of the file. Says which are gone, and which are not and why.
    pub(super) fn punch<'a>(
        &self,
        pages: &'a [u64],
    ) -> (&'a [u64], Option<(&'a [u64], RegionError)>) {
        let mut gone = 0;
        for run in runs(pages.iter().copied()) {
            if let Err(error) = self.file.punch(&run) {
                let error = RegionError::io("cannot take pages out of the region's file")(error);
                return (&pages[..gone], Some((&pages[gone..], error)));
            }
            gone += (run.end - run.start) as usize;
        }
        (pages, None)
    }

    /// These pages, which were leaving, stay in the file.
    pub(super) fn stay(&self, pages: &[u64]) {
        let mut cache = lock(&self.cache);
        let wanted = pages.iter().copied().filter(|page| {
            let is = self.table.get(*page);
            // With nothing but zeroes in it, it is dirty again: the volume has nothing.
            let dirty = is.is_known_dirty();
            self.table.set(*page, Page { dirty, wanted: false, ..is.at(Place::Unmapped) });
            cache.cooling.push_back(*page);
            is.wanted
        });
        let wanted: Vec<_> = wanted.collect();
        drop(cache);
        self.arrived(&wanted);
    }

    /// These pages, which were leaving, are not in the file any more, where they took so many frames.
    pub(super) fn have_left(&self, pages: &[u64], frames: usize) {
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

    /// Sees to it that the volume has the pages, with what `content` says of runs of them. Says of each whether it has now, or that it could
    /// not be written.
    pub(super) fn write_back<'a>(
        &self,
        worker: usize,
        pages: &[u64],
        content: impl Fn(&Range<u64>) -> &'a [u8],
    ) -> (Vec<(u64, Option<bool>)>, Option<RegionError>) {
        let is_dirty = |page: &u64| self.table.get(*page).is_known_dirty();
        let is_full = |page: &u64| !is_zero(content(&(*page..*page + 1)));
        let (dirty, clean): (Vec<_>, Vec<_>) = pages.iter().copied().partition(is_dirty);
        let (full, empty): (Vec<_>, Vec<_>) = dirty.into_iter().partition(is_full);
        let mut written: Vec<_> = clean.into_iter().map(|page| (page, Some(true))).collect();
        let mut failed = None;
        let full_runs = runs(full.iter().copied());
        let data: Vec<_> = full_runs.iter().map(|run| (bytes(run).start, content(run))).collect();
        let sent = Instant::now();
        let stored = self
            .volume
            .write_many(worker, &data)
            .map_err(|error| failed = Some(error.into()))
            .is_ok();
        if let Some(link) = self.link.as_ref().filter(|_| !full.is_empty()) {
            link.carry(full.len(), sent);
        }
        add(&self.counters.written_back, if stored { full.len() } else { 0 });
        written.extend(full.iter().map(|page| (*page, stored.then_some(true))));
        for run in runs(empty.iter().copied()) {
            let Range { start, end } = bytes(&run);
            let gone = self.volume.discard(worker, start, end - start);
            let gone = gone.map_err(|error| failed = Some(error.into())).is_ok();
            add(&self.counters.found_zero, if gone { (run.end - run.start) as usize } else { 0 });
            written.extend(run.map(|page| (page, gone.then_some(false))));
        }
        written.sort_unstable();
        (written, failed)
    }
}
