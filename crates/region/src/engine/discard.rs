//! Discards: programs give up pages.

use std::ops::Range;

use aquifer_region_client::Run;

use super::{Engine, bytes, evict};
use crate::counters::add;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// The number of pages discarded together.
const CHUNK: u64 = 4096;

impl Engine {
    /// Makes these pages read as zeroes, and frees their memory, here and at the lenders.
    ///
    /// # Errors
    /// The pages are not all in the region, the region is being handed over, or a page cannot be
    /// removed or unshared.
    pub fn discard(&self, pages: Run) -> Result<(), RegionError> {
        if pages.first.checked_add(pages.count).is_none_or(|end| end > self.table.pages()) {
            return Err(RegionError::Misuse("the pages are not all in the region".to_owned()));
        }
        self.discard_unwatched(&(pages.first..pages.end()))
            .map_err(RegionError::io("cannot remove pages from the region's file"))?;
        let mut first = pages.first;
        let mut reachable = true;
        while first < pages.end() {
            let end = pages.end().min(first + CHUNK);
            self.discard_chunk(first, end, &mut reachable)?;
            first = end;
        }
        Ok(())
    }

    fn discard_chunk(&self, first: u64, end: u64, reachable: &mut bool) -> Result<(), RegionError> {
        let mut next = first;
        while next < end {
            self.unshare_for_discard(next..end)?;
            let mut cache = lock(&self.cache);
            // Pages that are nowhere stay so, even in another host's region. QEMU discards absent
            // pages while it waits for its guest.
            if (next..end).all(|page| self.is_nowhere(page)) {
                return Ok(());
            }
            self.may_change()?;
            let (mut framed, mut stored, mut discarded) = (Vec::new(), false, 0);
            let from = next;
            while next < end {
                let is = self.table.get(next);
                if matches!(is.place, Place::Filling | Place::Leaving | Place::Shared) {
                    break;
                }
                if is.has_frame() {
                    framed.push(next);
                    cache.policy.went(next);
                }
                stored |= is.stored;
                discarded += usize::from(is.place != Place::Zero || is.awaiting_source);
                // No thread may touch these pages before this is done, as one request discards all
                // of them in the volume. A later engine finds the page absent or unchanged, and no
                // state in between.
                let leaving = Page {
                    place: Place::Leaving,
                    stored: false,
                    dirty: true,
                    awaiting_source: false,
                    ..is
                };
                self.table.set(next, leaving);
                next += 1;
            }
            if next == from {
                self.wait_for_change(cache);
                continue;
            }
            drop(cache);
            add(&self.counters.discarded, discarded);
            self.take_out(from..next, &framed, stored && *reachable, reachable)?;
        }
        Ok(())
    }

    /// Makes lenders discard pages that an earlier engine was about to discard, as far as they are
    /// still nowhere. Pages that an unreachable lender keeps are never asked for.
    pub(super) fn discard_leftovers(&self) {
        let leftovers = std::mem::take(&mut *lock(&self.lenders.leftovers));
        let few = leftovers.iter().flat_map(|run| {
            run.clone()
                .step_by(evict::BATCH)
                .map(|first| first..run.end.min(first + evict::BATCH as u64))
        });
        for run in few {
            let cache = lock(&self.cache);
            if self.is_frozen() || self.has_ended() {
                return;
            }
            let pages: Vec<u64> = run.filter(|page| self.is_nowhere(*page)).collect();
            for page in &pages {
                self.table
                    .set(*page, Page { dirty: true, ..self.table.get(*page).at(Place::Leaving) });
            }
            drop(cache);
            let discarded = runs(pages.iter().copied()).iter().map(bytes).try_for_each(
                |Range { start, end }| {
                    self.lenders.volume.discard(self.control_worker(), start, end - start)
                },
            );
            self.complete_removal(&pages, 0);
            if let Err(error) = discarded {
                tracing::warn!(
                    "cannot discard pages of an interrupted discard at the lenders: {error}"
                );
                return;
            }
        }
    }

    pub(super) fn is_nowhere(&self, page: u64) -> bool {
        let is = self.table.get(page);
        is.place == Place::Zero && !is.stored && !is.awaiting_source
    }

    /// Removes leaving pages from the file, where it has them, and from the volume.
    fn take_out(
        &self,
        pages: Range<u64>,
        framed: &[u64],
        stored: bool,
        reachable: &mut bool,
    ) -> Result<(), RegionError> {
        let (gone, stuck) = self.punch(framed);
        self.were_discarded(gone);
        if stored {
            let Range { start, end } = bytes(&pages);
            // A lender keeps the pages that it did not discard until they are overwritten or the
            // lease ends. Only one timeout is spent on an unreachable lender.
            if let Err(error) =
                self.lenders.volume.discard(self.control_worker(), start, end - start)
            {
                tracing::warn!("cannot discard pages at the lenders: {error}");
                *reachable = false;
            }
        }
        let (stuck, failed) = stuck.map_or((&[][..], Ok(())), |(pages, error)| (pages, Err(error)));
        self.stay(stuck);
        let left: Vec<_> = pages.filter(|page| stuck.binary_search(page).is_err()).collect();
        self.complete_removal(&left, gone.len());
        failed
    }
}
