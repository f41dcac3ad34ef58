//! Going on where an engine before this one ended, however it did.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use aquifer_page::{EXTENT_SIZE, PAGE_SIZE, PAGES_PER_EXTENT};

use super::{Engine, bytes};
use crate::file::runs;
use crate::lock;
use crate::places::Places;
use crate::table::{Page, Place};

impl Engine {
    /// Makes the table say where every page is. What decides is whether it is in the file.
    pub(super) fn recover(&self, places: &Places) -> io::Result<()> {
        let present = self.file.present()?;
        let mut present = present.into_iter().flatten().peekable();
        // The engine before may have been about to write them, or to discard them: the volume has them, or not.
        let mut unsure = HashSet::new();
        let mut cache = lock(&self.cache);
        for page in 0..self.table.pages() {
            let was = self.table.get(page);
            let is = Page { wanted: false, ..was };
            let is = if present.next_if_eq(&page).is_some() {
                cache.frames += 1;
                cache.policy.came(page);
                // Not yet, or no more, in a page table is as good as being there: a fault tells. Whether it was written to is
                // still marked in the program's page table.
                let dirty = is.dirty || !is.stored || !was.has_frame();
                Page { dirty, ..is.at(Place::Resident) }
            } else {
                if matches!(was.place, Place::Resident | Place::Unmapped) {
                    tracing::error!(page, "is not in the region's file any more, where it was");
                }
                is.without_frame()
            };
            if was.has_frame() && !was.stored {
                unsure.insert(page);
            }
            if is != was {
                self.table.set(page, is);
            }
        }
        drop(cache);
        let placed: HashSet<_> = places.all().map(|(extent, _)| extent as u64).collect();
        let lost = (0..self.table.pages())
            .filter(|page| !placed.contains(&(page / PAGES_PER_EXTENT)))
            .find(|page| self.table.get(*page).stored);
        if let Some(page) = lost {
            let why = format!("page {page} was with the engine before this one, and with no lender");
            return Err(io::Error::other(why));
        }
        for (extent, place) in places.all() {
            let first = extent as u64 * PAGES_PER_EXTENT;
            let last = (first + PAGES_PER_EXTENT).min(self.table.pages());
            let at = |page: u64| page * PAGE_SIZE as u64 - extent as u64 * EXTENT_SIZE;
            let within = |pages: &Range<u64>| at(pages.start)..at(pages.end);
            let stored = runs((first..last).filter(|page| self.table.get(*page).stored));
            let left = runs((first..last).filter(|page| unsure.contains(page)));
            let written = stored.iter().chain(&left).map(within);
            self.volume.restore(extent, place, written).map_err(io::Error::other)?;
            for run in left.iter().map(bytes) {
                self.volume
                    .discard(self.control_worker(), run.start, run.end - run.start)
                    .map_err(io::Error::other)?;
            }
        }
        Ok(())
    }
}
