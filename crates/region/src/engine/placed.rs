//! Victims for leases that are smaller than the region: pages of extents that have a place, and of
//! as many others as still find one.
//!
//! The policy knows nothing of extents. If it finds no page that can leave, a hand goes round over
//! those that have a place, as in CLOCK. A victim that is touched before it leaves the cache
//! stays, as any victim does.

use aquifer_page::{ExtentIndex, PAGES_PER_EXTENT};

use super::Engine;
use super::cache::Cache;
use crate::table::Place;

/// The places for extents that have none yet.
#[derive(Debug)]
pub(super) struct Places {
    /// How many extents may get one; `None`: all.
    free: Option<u64>,
    /// The extents that take one.
    taken: Vec<ExtentIndex>,
}

impl Places {
    pub(super) fn for_all() -> Self {
        Self { free: None, taken: Vec::new() }
    }

    /// Returns whether some extents find no place.
    pub(super) fn are_few(&self) -> bool {
        self.free.is_some()
    }

    /// Returns how many pages the policy may offer in vain for this many victims.
    pub(super) fn looks(&self, victims: usize) -> usize {
        match self.free {
            None => usize::MAX,
            Some(0) => 0,
            Some(_) => victims.saturating_mul(8),
        }
    }
}

impl Engine {
    pub(super) fn places(&self) -> Places {
        Places { free: self.lenders.volume.free_slots(), taken: Vec::new() }
    }

    /// Returns whether the page's extent has a place that it keeps, or takes one of these.
    pub(super) fn has_place(&self, places: &mut Places, page: u64) -> bool {
        let Some(free) = places.free else { return true };
        let extent = ExtentIndex(page / PAGES_PER_EXTENT);
        if self.lenders.volume.keeps(extent) || places.taken.contains(&extent) {
            return true;
        }
        let has_one = (places.taken.len() as u64) < free;
        if has_one {
            places.taken.push(extent);
        }
        has_one
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
            if !self.lenders.volume.keeps(ExtentIndex(page / PAGES_PER_EXTENT)) {
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
