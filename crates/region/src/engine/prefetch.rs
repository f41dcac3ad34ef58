//! Prefetch: pages are brought before they are touched.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_page::{PAGE_SIZE, PAGES_PER_EXTENT, WorkerId};
use aquifer_region_client::Filled;

use super::Engine;
use super::cache::Cache;
use super::fault::FaultRequest;
use crate::counters::add;
use crate::file::runs;
use crate::lock;
use crate::prefetch::{Account, Guess, MOST, Proven};
use crate::table::{Page, Place};

/// Makes a buffer for the largest run of prefetched pages.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; (MOST as usize) * PAGE_SIZE]
}

/// Prefetched pages with no known touch since.
#[derive(Debug)]
pub(super) struct Early {
    /// A bit for each page of the region.
    bits: Box<[AtomicU64]>,
    /// The number of set bits.
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

    /// Removes these pages, and returns how many of them there were.
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
    /// Fetches the pages that the faulting thread is likely to touch next. Errors are ignored; they
    /// recur when the pages are touched.
    pub(super) fn prefetch(&self, worker: WorkerId, request: &FaultRequest, buffer: &mut [u8]) {
        let guess = self.guess(request, &|| self.most_prefetched());
        let Some(guess) = guess else { return };
        // No thread waits for this work, so another worker takes over the wait for faults.
        self.faults.poll_token.pass_on();
        let pages = self.take_remote(worker, request.page, guess);
        let (mut fetched, mut used) = (0, 0);
        // The pages of one extent do not wait for the lender of another.
        for pages in pages.chunk_by(|one, next| one / PAGES_PER_EXTENT == next / PAGES_PER_EXTENT) {
            let read = self.read_many(worker, &runs(pages.iter().copied()), buffer);
            for (page, data) in pages.iter().copied().zip(buffer.chunks_exact(PAGE_SIZE)) {
                let was = self.table.get(page);
                let is = was.at(Place::Remote);
                // Clean, as the kernel marks the next write.
                if read.is_ok() && matches!(request.program.fill(page, data, true), Ok(Filled::Now))
                {
                    fetched += 1;
                    if was.wanted {
                        used += 1
                    } else {
                        self.early.add(page)
                    }
                    let is = Page { wanted: false, ..is.at(Place::Resident) };
                    self.complete_fill(page, is, false);
                } else {
                    self.abort_fill(page, Page { wanted: false, ..is });
                }
            }
        }
        add(&self.counters.prefetched, fetched as usize);
        add(&self.counters.prefetch_used, used as usize);
        let mut account = lock(&self.early.account);
        account.fetched(fetched);
        account.used(used);
    }

    fn guess(&self, request: &FaultRequest, most: &dyn Fn() -> u64) -> Option<Guess> {
        let used = |proven: Proven| self.were_used(proven.pages());
        request.program.prefetchers.guess(request.fault.thread, request.page, &used, most)
    }

    /// Returns how many pages a proven pattern may fetch. The limits keep guesses from filling a
    /// small cache, and wrong guesses from filling any.
    fn most_prefetched(&self) -> u64 {
        let limit = lock(&self.cache).limit;
        let most = MOST.min(limit / 16);
        let open = MOST.max(limit / 64).min(limit / 8);
        if lock(&self.early.account).allows(open) { most } else { 0 }
    }

    /// Counts a touch of those of these pages that were prefetched.
    pub(super) fn were_used(&self, pages: impl IntoIterator<Item = u64>) {
        let used = self.early.take(pages);
        if used > 0 {
            add(&self.counters.prefetch_used, used as usize);
            lock(&self.early.account).used(used);
        }
    }

    /// Counts prefetched pages that left the cache.
    pub(super) fn were_let_go(&self, pages: &[u64]) {
        let wasted = self.early.take(pages.iter().copied());
        if wasted > 0 {
            add(&self.counters.prefetch_wasted, wasted as usize);
            lock(&self.early.account).wasted(wasted);
        }
    }

    /// Forgets prefetched pages that were discarded.
    pub(super) fn were_discarded(&self, pages: &[u64]) {
        let forgotten = self.early.take(pages.iter().copied());
        if forgotten > 0 {
            lock(&self.early.account).forgotten(forgotten);
        }
    }

    /// Takes frames for the remote ones among the guessed pages, and sets them to filling. Evicts
    /// pages for them if necessary. Returns them in ascending order.
    fn take_remote(&self, worker: WorkerId, page: u64, guess: Guess) -> Vec<u64> {
        let mut cache = lock(&self.cache);
        let lacking = guess.count.saturating_sub(cache.free()) as usize;
        if lacking > 0 {
            drop(cache);
            // A page that cannot leave is reported when a touched page needs the room.
            let _ = self.evict(worker, lacking);
            cache = lock(&self.cache);
        }
        let pages = self.take_guessed(&mut cache, page, guess, Place::Remote);
        drop(cache);
        pages
    }

    /// Takes frames for the guessed pages at this place, as far as frames are free, and sets the
    /// pages to filling. Returns them in ascending order.
    fn take_guessed(&self, cache: &mut Cache, page: u64, guess: Guess, place: Place) -> Vec<u64> {
        let mut pages = Vec::with_capacity(guess.count as usize);
        for page in guess.pages(page).take_while(|page| *page < self.table.pages()) {
            let is = self.table.get(page);
            if is.place == place && !is.awaiting_source && cache.frames < cache.limit {
                self.take(cache, page, is, Place::Filling);
                pages.push(page);
            }
        }
        self.see_to_room(cache);
        pages.sort_unstable();
        pages
    }

    /// Maps zero pages ahead of a thread that touched one, as long as no page must leave for them.
    /// The thread waits meanwhile, as a fill takes as long as a write. A thread that came too early
    /// would wait longer.
    pub(super) fn zero_ahead(&self, request: &FaultRequest) {
        let most = || {
            let cache = lock(&self.cache);
            MOST.min(cache.limit / 16).min(cache.free().saturating_sub(cache.reserve()))
        };
        let guess = self.guess(request, &most);
        let Some(guess) = guess else { return };
        let mut cache = lock(&self.cache);
        let pages = self.take_guessed(&mut cache, request.page, guess, Place::Zero);
        drop(cache);
        for page in pages {
            let is = self.table.get(page).at(Place::Zero);
            if matches!(request.program.fill_zero(page), Ok(Filled::Now | Filled::Before)) {
                self.complete_fill(
                    page,
                    Page { dirty: true, wanted: false, ..is.at(Place::Resident) },
                    false,
                );
                add(&self.counters.zeroed, 1);
            } else {
                self.abort_fill(page, Page { wanted: false, ..is });
            }
        }
    }
}
