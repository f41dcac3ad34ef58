//! Bringing pages before they are touched.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_mapping::Filled;
use aquifer_page::PAGE_SIZE;

use super::fault::Touch;
use super::{Cache, Engine};
use crate::counters::add;
use crate::file::runs;
use crate::lock;
use crate::prefetch::{Account, Guess, MOST, Proven};
use crate::table::{Page, Place};

/// A buffer that a run of pages fits.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; (MOST as usize) * PAGE_SIZE]
}

/// Pages that were fetched before they were touched, and of which it is not known whether they were.
#[derive(Debug)]
pub(super) struct Early {
    /// A bit a page.
    bits: Box<[AtomicU64]>,
    /// How many there are.
    count: AtomicU64,
    account: Mutex<Account>,
}

impl Early {
    pub(super) fn new(pages: u64) -> Self {
        let bits = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { bits, count: AtomicU64::new(0), account: Mutex::default() }
    }

    fn add(&self, page: u64) {
        self.bits[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// How many of these pages there are, and are no more.
    fn take(&self, pages: impl IntoIterator<Item = u64>) -> u64 {
        if self.count.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let taken = pages.into_iter().filter(|page| {
            let (word, bit) = (self.bits.get((page / 64) as usize), 1 << (page % 64));
            word.is_some_and(|word| {
                word.load(Ordering::Relaxed) & bit != 0
                    && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
            })
        });
        let taken = taken.count() as u64;
        self.count.fetch_sub(taken, Ordering::Relaxed);
        taken
    }
}

impl Engine {
    /// Fetches what the thread that touched a page is likely to touch next. What goes wrong goes wrong again when they are touched.
    pub(super) fn prefetch(&self, worker: usize, touch: &Touch<'_>, buffer: &mut [u8]) {
        let guess = self.guess(touch, &|| self.most_prefetched());
        let Some(guess) = guess else { return };
        // Nobody waits for this: whoever touches something meanwhile is to be served.
        self.turn.pass_on();
        let pages = self.take_remote(worker, touch.page, guess);
        let (mut fetched, mut used) = (0, 0);
        for run in runs(pages) {
            let data = &mut buffer[..(run.end - run.start) as usize * PAGE_SIZE];
            let read = self.read(worker, run.start, data);
            for (page, data) in run.zip(data.chunks_exact(PAGE_SIZE)) {
                let was = self.table.get(page);
                let is = was.at(Place::Remote);
                // Clean, as a write is noticed.
                if read.is_ok() && matches!(touch.program.fill(page, data, true), Ok(Filled::Now)) {
                    fetched += 1;
                    if was.wanted {
                        used += 1
                    } else {
                        self.early.add(page)
                    }
                    self.settle(page, Page { wanted: false, ..is.at(Place::Resident) }, false);
                } else {
                    self.unsettle(page, Page { wanted: false, ..is });
                }
            }
        }
        add(&self.counters.prefetched, fetched as usize);
        add(&self.counters.prefetch_used, used as usize);
        let mut account = lock(&self.early.account);
        account.fetched(fetched);
        account.used(used);
    }

    fn guess(&self, touch: &Touch<'_>, most: &dyn Fn() -> u64) -> Option<Guess> {
        let used = |proven: Proven| self.were_used(proven.pages());
        touch.program.guess(touch.fault.thread, touch.page, &used, most)
    }

    /// So many pages can be fetched for a pattern that is proven. A small cache is not to be filled with guesses, nor any with such as turn out to
    /// be wrong.
    fn most_prefetched(&self) -> u64 {
        let limit = lock(&self.cache).limit;
        let most = MOST.min(limit / 16);
        let open = MOST.max(limit / 64).min(limit / 8);
        if lock(&self.early.account).allows(open) { most } else { 0 }
    }

    /// Somebody touched these pages.
    pub(super) fn were_used(&self, pages: impl IntoIterator<Item = u64>) {
        let used = self.early.take(pages);
        if used > 0 {
            add(&self.counters.prefetch_used, used as usize);
            lock(&self.early.account).used(used);
        }
    }

    /// These pages left the cache.
    pub(super) fn were_let_go(&self, pages: &[u64]) {
        let wasted = self.early.take(pages.iter().copied());
        if wasted > 0 {
            add(&self.counters.prefetch_wasted, wasted as usize);
            lock(&self.early.account).wasted(wasted);
        }
    }

    /// These pages were discarded.
    pub(super) fn were_discarded(&self, pages: &[u64]) {
        let forgotten = self.early.take(pages.iter().copied());
        if forgotten > 0 {
            lock(&self.early.account).forgotten(forgotten);
        }
    }

    /// Takes frames for those of the guessed pages that are remote, as far as there are any or can be, and has them be under way: in
    /// ascending order.
    fn take_remote(&self, worker: usize, page: u64, guess: Guess) -> Vec<u64> {
        let mut cache = lock(&self.cache);
        let lacking = guess.count.saturating_sub(cache.free()) as usize;
        if lacking > 0 {
            drop(cache);
            // What cannot leave is told when a touched page needs the room.
            let _ = self.evict(worker, lacking);
            cache = lock(&self.cache);
        }
        let pages = self.take(&mut cache, page, guess, Place::Remote);
        drop(cache);
        pages
    }

    /// Takes frames for those of the guessed pages that are at this place, as far as there are any, and has them be under way: in ascending order.
    fn take(&self, cache: &mut Cache, page: u64, guess: Guess, place: Place) -> Vec<u64> {
        let mut pages = Vec::with_capacity(guess.count as usize);
        for page in guess.pages(page).take_while(|page| *page < self.table.pages()) {
            let is = self.table.get(page);
            if is.place == place && !is.coming && cache.frames < cache.limit {
                cache.frames += 1;
                self.table.set(page, is.at(Place::Filling));
                pages.push(page);
            }
        }
        self.see_to_room(cache);
        pages.sort_unstable();
        pages
    }

    /// Puts pages of zeroes where the thread that touched such a page is likely to touch next, as long as no page has to leave for it. The thread
    /// waits meanwhile: to fill a page takes as long as to write to it, and who comes too early waits for longer.
    pub(super) fn zero_ahead(&self, touch: &Touch<'_>) {
        let most = || {
            let cache = lock(&self.cache);
            MOST.min(cache.limit / 16).min(cache.free().saturating_sub(cache.reserve()))
        };
        let guess = self.guess(touch, &most);
        let Some(guess) = guess else { return };
        let mut cache = lock(&self.cache);
        let pages = self.take(&mut cache, touch.page, guess, Place::Zero);
        drop(cache);
        for page in pages {
            let is = self.table.get(page).at(Place::Zero);
            if matches!(touch.program.fill_zero(page), Ok(Filled::Now | Filled::Before)) {
                self.settle(
                    page,
                    Page { dirty: true, wanted: false, ..is.at(Place::Resident) },
                    false,
                );
                add(&self.counters.zeroed, 1);
            } else {
                self.unsettle(page, Page { wanted: false, ..is });
            }
        }
    }
}
