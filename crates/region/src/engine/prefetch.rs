//! Bringing pages before they are touched.

use aquifer_mapping::Filled;
use aquifer_page::PAGE_SIZE;

use super::fault::Touch;
use super::{Cache, Engine};
use crate::counters::add;
use crate::file::runs;
use crate::lock;
use crate::prefetch::{Guess, MOST};
use crate::table::{Page, Place};

/// A buffer that a run of pages fits.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; (MOST as usize) * PAGE_SIZE]
}

impl Engine {
    /// Fetches what the thread that touched a page is likely to touch next. What goes wrong goes wrong again when they are touched.
    pub(super) fn prefetch(&self, worker: usize, touch: &Touch<'_>, buffer: &mut [u8]) {
        let most = Self::most_guessed(&lock(&self.cache));
        let guess = touch.program.guess(touch.fault.thread, touch.page, most);
        let Some(guess) = guess else { return };
        // Nobody waits for this: whoever touches something meanwhile is to be served.
        self.turn.pass_on();
        let pages = self.take_remote(worker, touch.page, guess);
        for run in runs(pages) {
            let data = &mut buffer[..(run.end - run.start) as usize * PAGE_SIZE];
            let fetched = self.read(worker, run.start, data);
            for (page, data) in run.zip(data.chunks_exact(PAGE_SIZE)) {
                let is = self.table.get(page).at(Place::Remote);
                // Clean, as a write is noticed.
                let filled = fetched.is_ok() && touch.program.fill_clean(page, data);
                if filled {
                    self.settle(page, Page { wanted: false, ..is.at(Place::Resident) }, false);
                    add(&self.counters.prefetched, 1);
                } else {
                    self.unsettle(page, Page { wanted: false, ..is });
                }
            }
        }
    }

    /// A small cache is not to be filled with guesses.
    fn most_guessed(cache: &Cache) -> u64 {
        MOST.min(cache.limit / 16)
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
        for step in 1..=guess.count as i64 {
            let Some(page) =
                page.checked_add_signed(step * guess.stride).filter(|page| *page < self.table.pages())
            else {
                break;
            };
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
        let cache = lock(&self.cache);
        let most = Self::most_guessed(&cache).min(cache.free().saturating_sub(cache.reserve()));
        drop(cache);
        if most == 0 {
            return;
        }
        let guess = touch.program.guess(touch.fault.thread, touch.page, most);
        let Some(guess) = guess else { return };
        let mut cache = lock(&self.cache);
        let pages = self.take(&mut cache, touch.page, guess, Place::Zero);
        drop(cache);
        for page in pages {
            let is = self.table.get(page).at(Place::Zero);
            if matches!(touch.program.fill_zero(page), Ok(Filled::Now | Filled::Before)) {
                self.settle(page, Page { dirty: true, wanted: false, ..is.at(Place::Resident) }, false);
                add(&self.counters.zeroed, 1);
            } else {
                self.unsettle(page, Page { wanted: false, ..is });
            }
        }
    }
}
