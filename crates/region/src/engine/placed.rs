//! Victims for leases that are smaller than the region, or away: pages of extents that have a place
//! at a lender that answers, and of as many others as still find one.
//!
//! Pages of an extent whose lender is away stay while others can leave. Otherwise each fault that
//! needs a frame would fail, also those on pages of healthy lenders.
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
    /// Some extents are at lenders that are away.
    misses_lenders: bool,
}

impl Places {
    pub(super) fn for_all() -> Self {
        Self { free: None, taken: Vec::new(), misses_lenders: false }
    }

    /// Returns whether some extents find no place, or are at lenders that are away.
    pub(super) fn are_few(&self) -> bool {
        self.free.is_some() || self.misses_lenders
    }

    /// Returns how many pages the policy may offer in vain for this many victims.
    pub(super) fn looks(&self, victims: usize) -> usize {
        match self.free {
            None if !self.misses_lenders => usize::MAX,
            Some(0) => 0,
            None | Some(_) => victims.saturating_mul(8),
        }
    }
}

impl Engine {
    pub(super) fn places(&self) -> Places {
        let volume = &self.lenders.volume;
        let (free, misses_lenders) = (volume.free_slots(), volume.misses_lenders());
        Places { free, taken: Vec::new(), misses_lenders }
    }

    /// Returns whether the page's extent has a place that it keeps, or takes one of these.
    pub(super) fn has_place(&self, places: &mut Places, page: u64) -> bool {
        let extent = ExtentIndex(page / PAGES_PER_EXTENT);
        if places.misses_lenders && self.lenders.volume.is_away(extent) {
            return false;
        }
        let Some(free) = places.free else { return true };
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
