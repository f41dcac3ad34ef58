//! The destination of a hand-over: pages and their states arrive before the region is this host's.

use std::ops::Range;

use aquifer_page::{PAGE_SIZE, PAGES_PER_EXTENT};
use aquifer_region_client::Run;
use aquifer_volume::Ledger as _;

use super::Engine;
use crate::error::RegionError;
use crate::file::runs;
use crate::handover::{Extent, Frame, PAGES};
use crate::lock;
use crate::table::{Page, Place};

/// The progress of a hand-over to this host.
#[derive(Debug, Default)]
pub struct Incoming {
    /// The states of pages have come. Pages that come later were written to after that.
    has_states: bool,
    /// Whether each page came from the source. Other pages that are here do not count.
    came: Vec<bool>,
    /// Whether the volume has each page, in this version or an older one.
    stored: Vec<bool>,
    /// The tag of each page in the volume, if the source sends them.
    tags: Option<Vec<u64>>,
}

impl Engine {
    /// Takes in a frame from the source engine.
    ///
    /// # Errors
    /// The frame is not for this engine, is not within the region, or its pages cannot be stored.
    /// The caller must take in no more frames then.
    pub fn take_in(
        &self,
        incoming: &mut Incoming,
        frame: &Frame,
        data: &[u8],
    ) -> Result<(), RegionError> {
        if !self.is_frozen() {
            return match frame {
                Frame::Pages(run) => self.accept_postcopy(*run, data),
                _ => Err(RegionError::Misuse("the region already belongs to this host".to_owned())),
            };
        }
        let pages = self.table.pages() as usize;
        incoming.came.resize(pages, false);
        incoming.stored.resize(pages, false);
        match frame {
            Frame::Pages(run) => self.take_pages(incoming, *run, data),
            Frame::Purge(all) => all.iter().try_for_each(|run| {
                self.check(*run)?;
                (run.first..run.end()).for_each(|page| incoming.came[page as usize] = false);
                self.purge((run.first..run.end()).collect())
            }),
            Frame::States(first) => self.take_states(incoming, *first, data),
            Frame::Tags(first) => self.take_tags(incoming, *first, data),
            Frame::Leases => self.take_leases(data),
            Frame::Extents(extents) => {
                extents.iter().try_for_each(|extent| self.take_extent(incoming, extent))
            }
            other => Err(RegionError::Misuse(format!(
                "unexpected message for an incoming region: {other:?}"
            ))),
        }
    }

    pub(super) fn check(&self, run: Run) -> Result<(), RegionError> {
        match run.first.checked_add(run.count) {
            Some(end) if end <= self.table.pages() => Ok(()),
            _ => Err(RegionError::Misuse("the pages are outside the region".to_owned())),
        }
    }

    /// Checks that the run is in the region, and that the data is as long as its pages.
    pub(super) fn check_contents(&self, run: Run, data: &[u8]) -> Result<(), RegionError> {
        self.check(run)?;
        if run.count > PAGES || data.len() != run.count as usize * PAGE_SIZE {
            return Err(RegionError::Misuse(
                "the length of the data does not match its pages".to_owned(),
            ));
        }
        Ok(())
    }

    fn take_pages(
        &self,
        incoming: &mut Incoming,
        run: Run,
        data: &[u8],
    ) -> Result<(), RegionError> {
        self.check_contents(run, data)?;
        let were = self.take_frames(run);
        let put = self.file.put(run.first, data);
        for (page, was) in (run.first..run.end()).zip(were) {
            incoming.came[page as usize] = true;
            // Until its state is known, the page counts as present only here.
            let is = Page {
                dirty: true,
                wanted: false,
                awaiting_source: false,
                ..was.at(Place::Unmapped)
            };
            self.complete_fill(page, is, false);
        }
        put.map_err(RegionError::io("cannot put pages into the region's file"))
    }

    /// Sets these pages to filling, each with a frame.
    fn take_frames(&self, run: Run) -> Vec<Page> {
        let take = |page| {
            // Pages that come share nothing yet.
            let (mut cache, is) = self.lock_in_place(page);
            self.take(&mut cache, page, is, Place::Filling);
            is
        };
        (run.first..run.end()).map(take).collect()
    }

    /// Removes those of these pages that are here.
    fn purge(&self, pages: Vec<u64>) -> Result<(), RegionError> {
        let mut leaving = Vec::new();
        for page in pages {
            let (mut cache, is) = self.lock_in_place(page);
            if is.has_frame() {
                self.take(&mut cache, page, is, Place::Leaving);
                leaving.push(page);
            }
        }
        let (gone, stuck) = self.punch(&leaving);
        self.complete_removal(gone, gone.len());
        stuck.map_or(Ok(()), |(pages, error)| {
            self.stay(pages);
            Err(error)
        })
    }

    fn take_states(
        &self,
        incoming: &mut Incoming,
        first: u64,
        data: &[u8],
    ) -> Result<(), RegionError> {
        let end = self.table.pages().min(first.saturating_add(data.len() as u64 * 4));
        let mut strange = Vec::new();
        let cache = lock(&self.cache);
        for page in first..end {
            let state = data[((page - first) / 4) as usize] >> ((page - first) % 4 * 2) & 3;
            let (stored, dirty) = (state & 1 != 0, state & 2 != 0);
            let at = page as usize;
            incoming.stored[at] = stored;
            let is = self.table.get(page);
            let is = match is.place {
                // The page's current version was left behind.
                Place::Zero | Place::Remote => {
                    Page { stored, awaiting_source: dirty, ..is }.without_frame()
                }
                _ => Page { stored, dirty: dirty || !stored, ..is },
            };
            self.table.set(page, is);
            if is.has_frame() && !incoming.came[at] {
                self.table.set(page, Page { awaiting_source: dirty, ..is });
                strange.push(page);
            }
        }
        drop(cache);
        incoming.has_states = true;
        // A program that touched them before their state was known found zeroes.
        self.purge(strange)
    }

    fn take_tags(
        &self,
        incoming: &mut Incoming,
        first: u64,
        data: &[u8],
    ) -> Result<(), RegionError> {
        let (tags, rest) = data.as_chunks();
        if !rest.is_empty() {
            return Err(RegionError::Misuse("the last tag is not whole".to_owned()));
        }
        let pages = self.table.pages();
        let known = incoming.tags.get_or_insert_with(|| vec![0; pages as usize]);
        // The volume's last extent may end beyond the region.
        for (page, tag) in (first..pages).zip(tags) {
            known[page as usize] = u64::from_le_bytes(*tag);
        }
        Ok(())
    }

    fn take_extent(&self, incoming: &Incoming, of: &Extent) -> Result<(), RegionError> {
        // The number comes from the other host, which may send any.
        let first = of.extent.0.saturating_mul(PAGES_PER_EXTENT);
        let last = first.saturating_add(PAGES_PER_EXTENT).min(self.table.pages());
        if !incoming.has_states || first >= last {
            return Err(RegionError::Misuse("the extent is outside the region".to_owned()));
        }
        let Some(tags) = &incoming.tags else {
            let why = "the source host sends no tags: the same version of Aquifer must run there";
            return Err(RegionError::Misuse(why.to_owned()));
        };
        let at = |page: u64| page * PAGE_SIZE as u64 - of.extent.offset();
        let stored = runs((first..last).filter(|page| incoming.stored[*page as usize]));
        let place = (of.lease, of.slot);
        self.lenders.extent_map.note(of.extent, Some(place));
        let within = |run: &Range<u64>| at(run.start)..at(run.end);
        self.lenders.volume.restore(of.extent, place, stored.iter().map(within))?;
        self.lenders.volume.restore_tags(of.extent, &tags[first as usize..last as usize]);
        Ok(())
    }

    /// Fetches pages that are likely to be touched soon, until the cache is full or the engine
    /// ends.
    pub fn warm(&self, pages: &[Run]) {
        let mut buffer = vec![0; PAGES as usize * PAGE_SIZE];
        let known = pages.iter().take_while(|run| self.check(**run).is_ok());
        let mut pages = known.flat_map(|run| run.first..run.end()).peekable();
        while let Some(first) = pages.next().filter(|_| !self.has_ended()) {
            // The pages of one lender do not wait for another.
            let mut some = vec![first];
            while some.len() < PAGES as usize
                && let Some(page) = pages.next_if(|page| self.are_together(first, *page))
            {
                some.push(page);
            }
            if self.fetch_ahead(some, &mut buffer).is_none() {
                return;
            }
        }
    }

    /// Returns whether only the volume has the page, in its current version.
    pub(super) fn is_remote(&self, page: u64) -> bool {
        let is = self.table.get(page);
        is.place == Place::Remote && !is.awaiting_source
    }

    /// Fetches those of the pages that are remote. Returns `None` if there is no room, or a fetch
    /// fails.
    fn fetch_ahead(&self, mut pages: Vec<u64>, buffer: &mut [u8]) -> Option<()> {
        let mut cache = lock(&self.cache);
        if cache.free() < cache.reserve() + pages.len() as u64 {
            return None;
        }
        pages.retain(|page| {
            let is_remote = self.is_remote(*page);
            if is_remote {
                self.take(&mut cache, *page, self.table.get(*page), Place::Filling);
            }
            is_remote
        });
        drop(cache);
        pages.sort_unstable();
        self.fetch_taken(pages, buffer).ok()
    }

    /// Fetches these pages, which are filling, into the file. They fit the buffer.
    pub(super) fn fetch_taken(
        &self,
        pages: Vec<u64>,
        buffer: &mut [u8],
    ) -> Result<(), RegionError> {
        if pages.is_empty() {
            return Ok(());
        }
        let runs = runs(pages);
        let read = self.read_many(self.control_worker(), &runs, buffer);
        let mut fetched = read.map(drop).map_err(RegionError::from);
        let mut rest = &*buffer;
        for run in runs {
            let data;
            (data, rest) = rest.split_at((run.end - run.start) as usize * PAGE_SIZE);
            if fetched.is_ok() {
                let fail = RegionError::io("cannot put pages into the region's file");
                fetched = self.file.put(run.start, data).map_err(fail);
            }
            self.are_put(run, fetched.is_ok(), |is| is);
        }
        fetched
    }

    /// Completes the fill of pages that were put into the file; `here` returns their state. Aborts
    /// it if they were not.
    pub(super) fn are_put(&self, pages: Range<u64>, put: bool, here: impl Fn(Page) -> Page) {
        for page in pages {
            let is = Page { wanted: false, ..self.table.get(page) };
            if put {
                self.complete_fill(page, here(is).at(Place::Unmapped), false);
            } else {
                // Removes any part of the page that was written.
                let _ = self.file.punch(&(page..page + 1));
                self.abort_fill(page, is.without_frame());
            }
        }
    }
}
