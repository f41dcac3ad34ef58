//! Pages that come home: out of the volume, and into a cache that is as large as the region.

use std::ops::Range;

use aquifer_page::PAGE_SIZE;
use aquifer_volume::VolumeError;

use super::Engine;
use super::cache::Cache;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// The number of pages that come together.
const CHUNK: u64 = 256;

impl Engine {
    /// Returns whether the cache has room for all pages of the region.
    pub(super) fn is_cache_whole(&self) -> bool {
        lock(&self.cache).limit >= self.table.pages()
    }

    /// Fetches all pages that the volume has, and discards them there, while programs run.
    ///
    /// # Errors
    /// A page cannot be fetched or discarded, or the cache has no longer room for all pages. Each
    /// page stays in at least one of both places.
    pub(super) fn bring_home(&self) -> Result<(), RegionError> {
        if !self.is_watched() {
            // No page has left.
            return Ok(());
        }
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        let mut next = 0;
        while next < self.table.pages() {
            let chunk = next..self.table.pages().min(next + CHUNK);
            self.fetch_remote(&chunk, &mut buffer)?;
            next = self.discard_stored(&chunk)?;
        }
        // Also what an earlier engine was about to discard.
        self.discard_leftovers();
        Ok(())
    }

    /// Fetches those of the pages that only the volume has.
    fn fetch_remote(&self, chunk: &Range<u64>, buffer: &mut [u8]) -> Result<(), RegionError> {
        let mut cache = lock(&self.cache);
        self.may_change()?;
        if cache.limit < self.table.pages() {
            let volume = self.lenders.volume.id();
            return Err(VolumeError::NoRoom(volume).into());
        }
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
        self.may_change()?;
        let mut next = chunk.start;
        let mut taken = Vec::new();
        while next < chunk.end {
            let is = self.table.get(next);
            if !is.is_in_place() || self.is_remote(next) {
                break;
            }
            if is.stored && !is.awaiting_source && is.place != Place::Lost {
                self.take(&mut cache, next, is, Place::Leaving);
                // A later engine must not trust the volume. The page is in the file or in a frame.
                let leaving = Page { stored: false, dirty: true, ..self.table.get(next) };
                self.table.set(next, leaving);
                taken.push((next, is.place));
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
        let wanted = self.are_home(&mut cache, &taken, discarded.is_err());
        drop(cache);
        self.arrived(&wanted);
        Ok(discarded.map(|()| next)?)
    }

    /// Puts leaving pages back to their places. Returns those for which threads wait.
    fn are_home(&self, cache: &mut Cache, pages: &[(u64, Place)], stored: bool) -> Vec<u64> {
        let mut wanted = Vec::new();
        for &(page, place) in pages {
            let is = self.table.get(page);
            self.table.set(page, Page { stored, dirty: true, wanted: false, ..is.at(place) });
            match place {
                Place::Resident => cache.policy.came(page),
                Place::Shared => {}
                _ => cache.cold_list.push_back(page),
            }
            if is.wanted {
                wanted.push(page);
            }
        }
        wanted
    }
}
