//! Pages that come home: out of a lease, and into a cache that is large enough without it.

use std::ops::Range;

use aquifer_page::{Bytes, EXTENT_SIZE, ExtentIndex, LeaseId, PAGE_SIZE, PAGES_PER_EXTENT};
use aquifer_volume::Progress;

use super::Engine;
use super::cache::{Cache, STUCK};
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// The number of pages that come together.
const CHUNK: u64 = 256;

impl Engine {
    /// Lets the cache keep the room that the region needs without this lease, until
    /// [`Self::need_no_room`]. Returns false if the cache is too small for that.
    pub(super) fn hold_room(&self, lease: LeaseId) -> bool {
        let is_known = self.lenders.volume.targets().iter().any(|target| target.lease == lease);
        let mut cache = lock(&self.cache);
        cache.leaving.push(lease);
        let may = !is_known || cache.limit >= self.least_cache(&cache.leaving).pages();
        if !may {
            cache.leaving.pop();
        }
        may
    }

    /// Ends what [`Self::hold_room`] began: the lease has left, or stays.
    pub(super) fn need_no_room(&self, lease: LeaseId) {
        let leaving = &mut lock(&self.cache).leaving;
        if let Some(at) = leaving.iter().position(|leaving| *leaving == lease) {
            leaving.swap_remove(at);
        }
    }

    /// Fetches all pages that this lease has, discards them there, and gives the lease up, while
    /// programs run.
    ///
    /// # Errors
    /// A page cannot be fetched or discarded, or the region is being handed over. Each page stays
    /// in at least one of both places, and the lease is in use again.
    pub(super) fn bring_home(
        &self,
        lease: LeaseId,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RegionError> {
        self.lenders.volume.give_up(lease, || self.bring_all(lease, progress))
    }

    /// Fetches all pages in the spill file, and empties it, while programs run. The caller made the
    /// cache as large as the region.
    ///
    /// # Errors
    /// A page cannot be fetched or discarded, or the region is being handed over. Each page stays
    /// in at least one of both places.
    pub fn empty_spill(&self, spill: LeaseId) -> Result<(), RegionError> {
        self.may_change()?;
        self.bring_all(spill, &mut |_| ())
    }

    fn bring_all(
        &self,
        lease: LeaseId,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RegionError> {
        if !self.is_watched() {
            // No page has left.
            return Ok(());
        }
        let extents = 0..self.table.pages().div_ceil(PAGES_PER_EXTENT);
        let is_on = |extent: &u64| self.lenders.volume.is_on(ExtentIndex(*extent), lease);
        let extents: Vec<u64> = extents.filter(is_on).collect();
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        let total = extents.len() as u64;
        for (moved, extent) in (0..).zip(&extents) {
            let (mut next, end) = (extent * PAGES_PER_EXTENT, (extent + 1) * PAGES_PER_EXTENT);
            let end = end.min(self.table.pages());
            while next < end && !self.has_ended() {
                let chunk = next..end.min(next + CHUNK);
                self.fetch_remote(&chunk, &mut buffer)?;
                next = self.discard_stored(&chunk)?;
                let moved = if next == end { moved + 1 } else { moved };
                progress(Progress { moved, total, left: Bytes((total - moved) * EXTENT_SIZE) });
            }
        }
        // Also what an earlier engine was about to discard.
        self.discard_leftovers();
        Ok(())
    }

    fn may_still_come(&self, cache: &Cache) -> Result<(), RegionError> {
        self.may_change()?;
        if cache.outgoing.is_some() {
            let why = "the region is being handed over to another host";
            return Err(RegionError::Misuse(why.to_owned()));
        }
        Ok(())
    }

    /// Fetches those of the pages that only the volume has.
    fn fetch_remote(&self, chunk: &Range<u64>, buffer: &mut [u8]) -> Result<(), RegionError> {
        let come = chunk.clone().filter(|page| self.is_remote(*page)).count();
        self.make_room_for(come as u64, Some(STUCK))?;
        let mut cache = lock(&self.cache);
        self.may_still_come(&cache)?;
        let taken: Vec<_> = chunk.clone().filter(|page| self.is_remote(*page)).collect();
        for page in &taken {
            self.take(&mut cache, *page, self.table.get(*page), Place::Filling);
        }
        drop(cache);
        self.fetch_taken(taken, buffer)
    }

    /// Discards the pages in the volume, up to the first that is on its way. Returns the first page
    /// for the next call.
    fn discard_stored(&self, chunk: &Range<u64>) -> Result<u64, RegionError> {
        let mut cache = lock(&self.cache);
        self.may_still_come(&cache)?;
        let mut next = chunk.start;
        let mut taken = Vec::new();
        while next < chunk.end {
            let is = self.table.get(next);
            if !is.is_in_place() || self.is_remote(next) {
                break;
            }
            // Also pages of zeroes: after a failed write, the volume may have a version of a page
            // that the table does not know of.
            if !is.awaiting_source && is.place != Place::Lost {
                self.take(&mut cache, next, is, Place::Leaving);
                // A later engine must not trust the volume. The page is in the file or in a frame.
                let leaving = Page { stored: false, dirty: true, ..self.table.get(next) };
                self.table.set(next, leaving);
                taken.push((next, is));
            }
            next += 1;
        }
        if next == chunk.start {
            self.wait_for_change(cache);
            return Ok(next);
        }
        drop(cache);
        let discarded = runs(taken.iter().map(|(page, _)| *page)).iter().try_for_each(|run| {
            let Range { start, end } = super::bytes(run);
            self.lenders.volume.discard(self.control_worker(), start, end - start)
        });
        let mut cache = lock(&self.cache);
        let wanted = self.are_home(&mut cache, &taken, discarded.is_ok());
        drop(cache);
        self.arrived(&wanted);
        Ok(discarded.map(|()| next)?)
    }

    /// Puts leaving pages back to their places. Returns those for which threads wait.
    fn are_home(&self, cache: &mut Cache, pages: &[(u64, Page)], discarded: bool) -> Vec<u64> {
        let mut wanted = Vec::new();
        for &(page, was) in pages {
            let is = self.table.get(page);
            let home = match was.place {
                Place::Zero => was,
                _ => Page { stored: was.stored && !discarded, dirty: true, ..was },
            };
            self.table.set(page, Page { wanted: false, ..home });
            match was.place {
                Place::Resident => cache.policy.came(page),
                Place::Zero | Place::Shared => {}
                _ => cache.cold_list.push_back(page),
            }
            if is.wanted {
                wanted.push(page);
            }
        }
        wanted
    }
}
