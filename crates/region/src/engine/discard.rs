//! Programs that need pages no more.

use std::ops::Range;

use aquifer_mapping::Run;

use super::{Engine, bytes, evict};
use crate::counters::add;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// Pages that are discarded together.
const CHUNK: u64 = 4096;

impl Engine {
    /// Makes these pages read as zeroes and gives back what they took, here and with lenders.
    ///
    /// # Errors
    /// When the pages are not the region's.
    pub fn discard(&self, pages: Run) -> Result<(), RegionError> {
        if pages.first.checked_add(pages.count).is_none_or(|end| end > self.table.pages()) {
            return Err(RegionError::Misuse("the pages are not all in the region".to_owned()));
        }
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
            self.give_up_shared(next..end)?;
            let mut cache = lock(&self.cache);
            // What is nowhere stays so, also where the region is another host's still: a QEMU that waits for its guest discards what the guest
            // has not got.
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
                discarded += usize::from(is.place != Place::Zero || is.coming);
                // Nobody touches a page before this is done, also where it is nowhere: the volume is asked for all of them at once. An engine that
                // comes after this one finds nothing, or the page as it was: nothing in between.
                let leaving =
                    Page { place: Place::Leaving, stored: false, dirty: true, coming: false, ..is };
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

    /// Has lenders forget pages that an engine before this one was about to discard, as far as they are nowhere still. What a lender that is
    /// away keeps of them nobody will ask for.
    pub(super) fn discard_leftovers(&self) {
        let leftovers = std::mem::take(&mut *lock(&self.leftovers));
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
                    self.volume.discard(self.control_worker(), start, end - start)
                },
            );
            self.have_left(&pages, 0);
            if let Err(error) = discarded {
                tracing::warn!(
                    "cannot give back pages that were being discarded when an engine ended: {error}"
                );
                return;
            }
        }
    }

    fn is_nowhere(&self, page: u64) -> bool {
        let is = self.table.get(page);
        is.place == Place::Zero && !is.stored && !is.coming
    }

    /// Takes pages, all of which are leaving, out of the file where they are in it, and out of the volume.
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
            // The lender keeps what nobody will ask for until it is written to or the lease ends. Its patience is waited for once.
            if let Err(error) = self.volume.discard(self.control_worker(), start, end - start) {
                tracing::warn!("cannot give back discarded pages: {error}");
                *reachable = false;
            }
        }
        let (stuck, failed) = stuck.map_or((&[][..], Ok(())), |(pages, error)| (pages, Err(error)));
        self.stay(stuck);
        let left: Vec<_> = pages.filter(|page| stuck.binary_search(page).is_err()).collect();
        self.have_left(&left, gone.len());
        failed
    }
}
