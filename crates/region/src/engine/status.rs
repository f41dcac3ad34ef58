//! The figures of an engine.

use std::sync::atomic::Ordering;

use aquifer_page::{Bytes, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use super::Engine;
use super::link::Link;
use crate::counters::{Counts, Times};
use crate::lock;
use crate::table::Place;

/// The parts of a region by their place, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The region's size.
    pub size: Bytes,
    /// The local cache's limit.
    pub cache: Bytes,
    /// The part in the local cache.
    pub resident: Bytes,
    /// The part kept once for several regions of the group, outside the local cache.
    #[serde(default)]
    pub shared: Bytes,
    /// The part of `resident` known to differ from the lenders' version. A page that a program has
    /// mapped may be dirty without that being known.
    pub dirty: Bytes,
    /// The part with lenders only.
    pub remote: Bytes,
    /// The part never written, or discarded.
    pub zero: Bytes,
    /// The part still with the source host, and on its way from there.
    pub awaiting_source: Bytes,
}

impl Engine {
    /// Returns the counts since the engine started.
    pub fn counts(&self) -> Counts {
        self.counters.counts()
    }

    /// Returns the times of remote faults.
    pub fn times(&self) -> Times {
        self.counters.times()
    }

    /// Returns the times of fetches over the emulated link, if there is one.
    pub fn link_times(&self) -> Option<Times> {
        self.lenders.link.as_ref().map(Link::took)
    }

    /// Returns the number of stalled faults, and of faults with a fetch in flight.
    pub fn waiting(&self) -> [usize; 2] {
        [lock(&self.faults.stalled).len(), self.faults.fetching.load(Ordering::Relaxed)]
    }

    /// Returns the parts of the region by their place.
    pub fn usage(&self) -> Usage {
        // The table knows nothing of pages that programs got from the kernel. Asked first: the
        // engine may begin to watch during the count.
        let unwatched = self.unwatched_pages();
        let mut pages = [0; 6];
        for page in 0..self.table.pages() {
            let is = self.table.get(page);
            match is.place {
                Place::Zero | Place::Remote if is.awaiting_source => pages[4] += 1,
                Place::Zero | Place::Lost => pages[0] += 1,
                Place::Remote => pages[1] += 1,
                Place::Shared => pages[5] += 1,
                _ => {
                    pages[2] += 1;
                    pages[3] += u64::from(is.dirty);
                }
            }
        }
        let bytes = |pages| Bytes(pages * PAGE_SIZE as u64);
        let (limit, frames) = {
            let cache = lock(&self.cache);
            (cache.limit, cache.frames)
        };
        if let Some(resident) = unwatched {
            let known: u64 = pages.iter().sum::<u64>() - pages[3];
            pages = [known.saturating_sub(resident), 0, resident, resident, 0, 0];
        }
        // Pages move during the count, so a page that left and its successor may both count. The
        // number of frames bounds the pages that are here.
        let extra = match unwatched {
            None => pages[2].saturating_sub(frames),
            Some(_) => 0,
        };
        pages[2] -= extra;
        pages[3] = pages[3].min(pages[2]);
        pages[1] += extra;
        let [zero, remote, resident, dirty, awaiting_source, shared] = pages.map(bytes);
        let (size, cache) = (bytes(self.table.pages()), bytes(limit));
        Usage { size, cache, resident, shared, dirty, remote, zero, awaiting_source }
    }

    /// Returns how many pages have come into the cache.
    pub fn came(&self) -> u64 {
        let Counts { zero_faults, remote_faults, prefetched, zeroed, .. } = self.counts();
        zero_faults + remote_faults + prefetched + zeroed
    }
}
