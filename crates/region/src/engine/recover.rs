//! Recovery after an earlier engine, which may have ended at any point.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use aquifer_page::{PAGE_SIZE, PAGES_PER_EXTENT};

use super::Engine;
use super::dirty::{Found, after_crash};
use crate::extent_map::ExtentMap;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

impl Engine {
    /// Makes the table hold the place of every page, and whether the page is dirty.
    ///
    /// # Errors
    /// The file cannot be read, a page has no place, or the volume cannot be restored.
    pub(super) fn recover(&self, extent_map: &ExtentMap) -> io::Result<()> {
        let present = self.file.present()?;
        let mut present = present.into_iter().flatten().peekable();
        let placed: HashSet<_> = extent_map.all().map(|(extent, _)| extent.0).collect();
        // The earlier engine may have been about to discard these, so the volume may or may not
        // have them.
        let mut unsure = HashSet::new();
        let mut cache = lock(&self.cache);
        for page in 0..self.table.pages() {
            let was = self.table.get(page);
            let in_file = present.next_if_eq(&page).is_some();
            let mut is = match after_crash(was, in_file, self.group.sharers.get(page).is_some()) {
                Found::Is(is) => is,
                Found::IsNot(is) => {
                    self.file.punch(&(page..page + 1))?;
                    is
                }
                Found::Lost => {
                    tracing::error!(
                        page,
                        "the page is lost: only the region's file held it, and no longer does"
                    );
                    Page { wanted: false, ..was.at(Place::Lost) }
                }
            };
            if is.has_frame() {
                cache.frames += 1;
                cache.policy.came(page);
            }
            if is.has_frame() && was.has_frame() && !self.is_frozen() {
                // The earlier engine may have been about to write it, so the volume has some
                // version of it.
                is.stored |= placed.contains(&(page / PAGES_PER_EXTENT));
            }
            if was.has_frame() && !was.stored {
                unsure.insert(page);
            }
            if is != was {
                self.table.set(page, is);
            }
        }
        drop(cache);
        let lost = (0..self.table.pages())
            .filter(|page| !placed.contains(&(page / PAGES_PER_EXTENT)))
            .find(|page| {
                let is = self.table.get(*page);
                is.place == Place::Remote && !is.awaiting_source
            });
        if let Some(page) = lost {
            let why =
                format!("page {page} is lost: only the earlier engine's cache held it, no lender");
            return Err(io::Error::other(why));
        }
        for (extent, place) in extent_map.all() {
            let first = extent.0 * PAGES_PER_EXTENT;
            let last = (first + PAGES_PER_EXTENT).min(self.table.pages());
            let at = |page: u64| page * PAGE_SIZE as u64 - extent.offset();
            let within = |pages: &Range<u64>| at(pages.start)..at(pages.end);
            // The volume may have nothing of a page that is dirty or still with the source host,
            // whatever the table says: an earlier engine may have found it zero, or never have
            // written it.
            let may_hold = |page: &u64| unsure.contains(page) || self.table.get(*page).stored;
            let held = runs((first..last).filter(may_hold));
            let held = held.iter().map(within);
            self.lenders.volume.restore(extent, place, held).map_err(io::Error::other)?;
            // Another host may have stored pages there since. A page that stays only takes the
            // lender's memory until the next write. Lenders need not be reachable yet.
            if !self.is_frozen() {
                let gone = (first..last)
                    .filter(|page| unsure.contains(page) && !self.table.get(*page).has_frame());
                lock(&self.lenders.leftovers).extend(runs(gone));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt as _;

    use aquifer_page::{Bytes, VolumeId};
    use aquifer_volume::VolumeConfig;

    use super::*;
    use crate::engine::{EngineConfig, Paging};
    use crate::error::RegionError;
    use crate::table::Table;

    impl Engine {
        /// Makes an engine for so many pages that were never written, without a lender.
        pub(in crate::engine) fn bare(pages: u64) -> Self {
            after(page(Place::Zero, false, false), false, pages).unwrap()
        }
    }

    /// Returns a page that no thread waits for, and that is not at the source host.
    fn page(place: Place, stored: bool, dirty: bool) -> Page {
        Page { place, stored, dirty, wanted: false, awaiting_source: false }
    }

    /// Makes the engine that follows one which died with page 0 in state `was`, without a lender.
    /// `in_file` says whether the file has the page.
    fn after(was: Page, in_file: bool, pages: u64) -> Result<Engine, RegionError> {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let paths =
            ["region", "table", "extent_map", "sharers"].map(|name| directory.path().join(name));
        let open = |at: usize, size: u64| {
            let mut options = OpenOptions::new();
            let file = options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&paths[at])
                .unwrap();
            file.set_len(size).unwrap();
            (paths[at].as_path(), file)
        };
        let files = [open(0, pages * PAGE_SIZE as u64), open(1, pages), open(2, 0), open(3, 0)];
        if in_file {
            files[0].1.write_all_at(b"here", 0).unwrap();
        }
        Table::new(&files[1].1, pages).unwrap().set(0, was);
        let config = EngineConfig {
            cache: Bytes::mib(1),
            may_be_unwatched: false,
            paging: Paging { workers: 1, ..Paging::default() },
            spill: None,
            copies: Vec::new(),
            disk: None,
            foreign: false,
        };
        let volume = VolumeConfig {
            id: VolumeId::random(),
            capacity: Bytes(pages * PAGE_SIZE as u64),
            workers: 0,
            io_timeout: VolumeConfig::DEFAULT_IO_TIMEOUT,
            tls: None,
            spill: None,
            ledger: None,
        };
        Engine::open(
            &config,
            volume,
            &[],
            files,
            ["mapped", "frames", "watched"].map(|name| directory.path().join(name)),
        )
    }

    #[test]
    fn a_page_leaving_as_its_extent_is_released_is_kept() {
        let leaving = Page { wanted: true, ..page(Place::Leaving, true, true) };
        let engine = after(leaving, true, 4).unwrap();
        let is = engine.table.get(0);
        assert_eq!((is.place, is.dirty, is.wanted), (Place::Resident, true, false));
        let mut here = [0; 4];
        engine.file.read(0, &mut here).unwrap();
        assert_eq!(&here, b"here");
    }

    #[test]
    fn a_page_that_is_coming_still_is_unless_it_came() {
        let filling =
            Page { wanted: true, awaiting_source: true, ..page(Place::Filling, true, false) };
        let engine = after(Page { stored: false, ..filling }, false, 4).unwrap();
        let is = engine.table.get(0);
        assert_eq!((is.place, is.awaiting_source, is.wanted), (Place::Zero, true, false));
        let engine = after(filling, true, 4).unwrap();
        let is = engine.table.get(0);
        assert_eq!((is.place, is.awaiting_source, is.dirty), (Place::Resident, false, true));
    }

    #[test]
    fn a_page_that_nobody_has_is_not_taken_for_zeroes() {
        let refused = after(page(Place::Remote, true, false), false, 4).unwrap_err().to_string();
        assert!(refused.contains("no lender"), "{refused}");
    }

    #[test]
    fn a_page_that_vanished_from_the_file_is_lost_and_not_zeroes() {
        for stored in [false, true] {
            let engine = after(page(Place::Unmapped, stored, true), false, 4).unwrap();
            assert_eq!(engine.table.get(0).place, Place::Lost);
            let refused = engine.begin_outgoing().unwrap_err().to_string();
            assert!(refused.contains("page 0 is lost"), "{refused}");
            // Its program need not want it any more.
            engine.discard(aquifer_region_client::Run { first: 0, count: 1 }).unwrap();
            assert_eq!(engine.table.get(0).place, Place::Zero);
        }
    }
}
