//! Victims for leases that are smaller than the region, once all of their slots hold extents: pages
//! of those extents.
//!
//! The policy knows nothing of extents, so a hand goes round over the pages that have a place, as
//! in CLOCK. A victim that is touched before it leaves the cache stays, as any victim does.

use aquifer_page::{ExtentIndex, PAGES_PER_EXTENT};

use super::Engine;
use super::cache::Cache;
use crate::table::Place;

impl Engine {
    /// Returns whether the page's extent has a place that it keeps.
    pub(super) fn has_place(&self, page: u64) -> bool {
        self.lenders.volume.keeps(ExtentIndex(page / PAGES_PER_EXTENT))
    }

    /// Returns the next resident pages that have a place, at most this many. Returns `None` if the
    /// cache has no page with a place, also none on its way.
    pub(super) fn placed(&self, cache: &mut Cache, most: usize) -> Option<Vec<u64>> {
        let pages = self.table.pages();
        let (mut found, mut some) = (Vec::with_capacity(most), false);
        let mut looked = 0;
        while looked < pages && (found.len() < most || !some) {
            let page = cache.hand % pages;
            let rest = (PAGES_PER_EXTENT - page % PAGES_PER_EXTENT).min(pages - page);
            if !self.has_place(page) {
                (cache.hand, looked) = (page + rest, looked + rest);
                continue;
            }
            for page in page..page + rest {
                if found.len() >= most && some {
                    break;
                }
                let is = self.table.get(page);
                some |= is.has_frame();
                if is.place == Place::Resident && found.len() < most {
                    found.push(page);
                }
                (cache.hand, looked) = (page + 1, looked + 1);
            }
        }
        some.then_some(found)
    }
}
