//! Fetching pages before they are touched.

use aquifer_page::PAGE_SIZE;

use super::Engine;
use super::fault::Touch;
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
        let guess = touch.program.guess(touch.fault.thread, touch.page);
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

    /// Takes frames for those of the guessed pages that are remote, as far as there are any or can be, and has them be under way: in
    /// ascending order.
    fn take_remote(&self, worker: usize, page: u64, guess: Guess) -> Vec<u64> {
        let mut pages = Vec::with_capacity(guess.count as usize);
        let mut cache = lock(&self.cache);
        // A small cache is not to be filled with guesses.
        let most = guess.count.min(cache.limit / 16);
        let lacking = most.saturating_sub(cache.free()) as usize;
        if lacking > 0 {
            drop(cache);
            // What cannot leave is told when a touched page needs the room.
            let _ = self.evict(worker, lacking);
            cache = lock(&self.cache);
        }
        for step in 1..=most as i64 {
            let Some(page) =
                page.checked_add_signed(step * guess.stride).filter(|page| *page < self.table.pages())
            else {
                break;
            };
            let is = self.table.get(page);
            if is.place == Place::Remote && cache.frames < cache.limit {
                cache.frames += 1;
                self.table.set(page, is.at(Place::Filling));
                pages.push(page);
            }
        }
        self.see_to_room(&mut cache);
        drop(cache);
        pages.sort_unstable();
        pages
    }
}
