//! Programs that need pages no more.

use aquifer_mapping::Run;

use super::{Engine, bytes};
use crate::counters::add;
use crate::error::RegionError;
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
            let mut cache = lock(&self.cache);
            let (mut framed, mut stored) = (Vec::new(), Vec::new());
            let from = next;
            while next < end {
                let is = self.table.get(next);
                match is.place {
                    Place::Filling | Place::Leaving => break,
                    Place::Zero => {}
                    _ => {
                        if is.has_frame() {
                            framed.push(next);
                            cache.policy.went(next);
                        }
                        if is.stored {
                            stored.push(next);
                        }
                        // An engine that comes after this one finds nothing, or the page as it was: nothing in between.
                        let leaving =
                            Page { stored: false, dirty: true, wanted: false, place: Place::Leaving };
                        self.table.set(next, leaving);
                    }
                }
                next += 1;
            }
            if next == from {
                self.wait_for_change(cache);
                continue;
            }
            drop(cache);
            self.take_out(&framed, &stored, reachable)?;
        }
        Ok(())
    }

    fn take_out(&self, framed: &[u64], stored: &[u64], reachable: &mut bool) -> Result<(), RegionError> {
        let (gone, stuck) = self.punch(framed);
        if let ([first, ..], [.., last], true) = (stored, stored, *reachable) {
            // All at once, with what lies between: those pages are to be discarded as well, and were nowhere, or if they have been written to
            // meanwhile may be discarded before or after that.
            let bytes = bytes(&(*first..last + 1));
            let discarded = self.volume.discard(self.control_worker(), bytes.start, bytes.end - bytes.start);
            // The lender keeps what nobody will ask for until it is written to or the lease ends. Its patience is waited for once.
            if let Err(error) = discarded {
                tracing::warn!("cannot give back discarded pages: {error}");
                *reachable = false;
            }
        }
        let mut all: Vec<_> = gone.iter().chain(stored).copied().collect();
        all.sort_unstable();
        all.dedup();
        let failed = stuck.map(|(pages, error)| {
            all.retain(|page| pages.binary_search(page).is_err());
            self.stay(pages);
            error
        });
        add(&self.counters.discarded, all.len());
        self.have_left(&all, gone.len());
        failed.map_or(Ok(()), Err)
    }
}
