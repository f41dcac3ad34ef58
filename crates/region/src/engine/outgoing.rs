//! The source of a hand-over: the pages that it must send, round by round (\[Jo20\], section 3.3).

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, ExtentIndex, PAGE_SIZE, PAGES_PER_EXTENT, is_zero};
use aquifer_region_client::Run;

use super::Engine;
use super::persist::cannot_look;
use crate::error::RegionError;
use crate::file::runs;
use crate::handover::{self, Extent, Frame, Round, Sent};
use crate::lock;
use crate::table::Place;

/// The number of pages examined under one lock.
const CHUNK: u64 = 4096;

/// The number of tags that are sent together if one of them has changed.
const TAGS: usize = 512;

/// How long the stopped region may take until no page is on its way.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);

/// The receiver of frames for the other engine.
pub type Sink<'a> = dyn FnMut(&Frame, &[u8]) -> io::Result<()> + 'a;

/// The pages that the destination has.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// The destination has the page, perhaps an older version.
    there: Vec<bool>,
    /// The destination has the page's current version, or the page is recorded in
    /// `left_at_source`.
    current: Vec<bool>,
    /// The page was left behind, and the destination must ask for it.
    left_at_source: Vec<bool>,
    /// No round has sent pages yet.
    first: bool,
    /// The tags that the destination has, by extent.
    tags: HashMap<ExtentIndex, Vec<u64>>,
}

impl Outgoing {
    /// Records that these pages have left or were written to. A send meanwhile may have sent any
    /// version.
    pub(super) fn changed(&mut self, pages: &[u64]) {
        pages.iter().for_each(|page| self.current[*page as usize] = false);
    }
}

/// The work of a round.
#[derive(Default)]
struct Plan {
    send: Vec<u64>,
    purge: Vec<u64>,
    sent: Sent,
}

impl Engine {
    /// Begins a hand-over; the other engine has no pages yet.
    ///
    /// # Errors
    /// A hand-over is under way or complete, a page is lost, or pages are still with the source
    /// host, or in this host's spill file. Also if shared pages cannot be unshared.
    pub fn begin_outgoing(&self) -> Result<(), RegionError> {
        self.may_change()?;
        self.may_hand_over(false)?;
        self.watch()?;
        let pages = self.table.pages() as usize;
        let mut cache = lock(&self.cache);
        if let Some(page) =
            (0..self.table.pages()).find(|page| self.table.get(*page).place == Place::Lost)
        {
            return Err(RegionError::Lost(page));
        }
        if (0..self.table.pages()).any(|page| self.table.get(page).awaiting_source) {
            let why = "some of its pages are still with the source host; try again in a moment";
            return Err(RegionError::Misuse(why.to_owned()));
        }
        if cache.outgoing.is_some() {
            return Err(RegionError::Misuse("the region is being handed over already".to_owned()));
        }
        let none = || vec![false; pages];
        cache.outgoing = Some(Outgoing {
            there: none(),
            current: none(),
            left_at_source: none(),
            first: true,
            tags: HashMap::new(),
        });
        drop(cache);
        // No more pages become shared from here on. Shared pages go as the region's own, as the
        // other host has other frames.
        self.unshare_all().inspect_err(|_| lock(&self.cache).outgoing = None)
    }

    /// Makes the region this host's, after a hand-over to it or an aborted one from it. The lenders
    /// then refuse the earlier hosts.
    pub fn own(&self) {
        self.lenders.volume.end_older_generations();
        self.freeze(false);
        let mut cache = lock(&self.cache);
        cache.outgoing = None;
        self.signals.fill_done.notify_all();
        self.signals.short.notify_all();
    }

    /// Does a round, and passes frames for the other engine to `sink`.
    ///
    /// # Errors
    /// The volume cannot be written to, or `sink` fails. Also if pages are on their way for too
    /// long.
    pub fn round(&self, round: Round, sink: &mut Sink<'_>) -> Result<Sent, RegionError> {
        // Without a place at lenders, a page can only go to the other host.
        let has_place = self.lenders.volume.shortage(&[]) == Bytes::ZERO;
        let round = if round == Round::Clean && !has_place { Round::Copy } else { round };
        if round == Round::Tags {
            self.send_tags(sink)?;
            return Ok(Sent::default());
        }
        if round == Round::Clean {
            let resident = self.usage().resident.pages();
            let cleaned = self.persist()?;
            self.send_tags(sink)?;
            return Ok(Sent { cleaned, resident, dirty: cleaned, ..Sent::default() });
        }
        if matches!(round, Round::Last | Round::Leave | Round::Rest) {
            self.freeze(true);
            self.wait_for_pages_in_flight()?;
        }
        self.may_hand_over(matches!(round, Round::Last | Round::Leave))?;
        let plan = self.plan(round)?;
        let fail = || RegionError::io("cannot send to the other host");
        for run in as_runs(&plan.purge).chunks(4096) {
            sink(&Frame::Purge(run.to_vec()), &[]).map_err(fail())?;
        }
        self.send(&plan.send, sink)?;
        if round != Round::Rest {
            self.send_tags(sink)?;
        }
        if matches!(round, Round::Last | Round::Leave) {
            self.send_states(sink).map_err(fail())?;
        }
        Ok(plan.sent)
    }

    /// Refuses a hand-over while pages are only in this host's spill file, or only in second
    /// copies. The other host cannot reach them there.
    fn may_hand_over(&self, strictly: bool) -> Result<(), RegionError> {
        if let Some(lease) = self.lenders.volume.relies_on_copy(strictly) {
            return Err(RegionError::Misuse(format!(
                "lease {lease} lacks pages that only its second copy has: bring its lender back, \
                 or evacuate the lease"
            )));
        }
        match self.lenders.volume.spilled() {
            None | Some(Bytes::ZERO) => Ok(()),
            Some(spilled) => Err(RegionError::Misuse(format!(
                "{spilled} of it are in the spill file of this host, as no lender had room; they \
                 leave it as other hosts lend, or if its cache grows to its size: try again then"
            ))),
        }
    }

    /// Waits until no page is on its way. The region is frozen, so none leaves.
    fn wait_for_pages_in_flight(&self) -> Result<(), RegionError> {
        let deadline = Instant::now() + FREEZE_TIMEOUT;
        let on_its_way =
            |page| matches!(self.table.get(page).place, Place::Filling | Place::Leaving);
        let mut first = 0;
        loop {
            // No earlier page can be on its way again: none leaves, and no thread touches one.
            let Some(page) = (first..self.table.pages()).find(|page| on_its_way(*page)) else {
                return Ok(());
            };
            first = page;
            let cache = lock(&self.cache);
            if !on_its_way(page) {
                continue;
            }
            if Instant::now() > deadline {
                let why =
                    format!("page {page} is still in transit; check that its lender is reachable");
                return Err(RegionError::Refused(why));
            }
            self.wait_for_change(cache);
        }
    }

    fn plan(&self, round: Round) -> Result<Plan, RegionError> {
        let _looking = lock(&self.programs.looking);
        let mut plan = Plan::default();
        let mut first = 0;
        let mut all = false;
        while first < self.table.pages() {
            let chunk = first..(first + CHUNK).min(self.table.pages());
            first = chunk.end;
            let mut cache = lock(&self.cache);
            self.note_dirty(&mut cache, &chunk).map_err(cannot_look)?;
            let outgoing = cache.outgoing.as_mut().ok_or_else(not_begun)?;
            if outgoing.first && round == Round::Copy {
                outgoing.first = false;
                all = true;
            }
            for page in chunk {
                let is = self.table.get(page);
                let at = page as usize;
                let is_here = matches!(is.place, Place::Resident | Place::Unmapped);
                let must = is.is_known_dirty();
                plan.sent.resident += u64::from(is_here);
                plan.sent.dirty += u64::from(is_here && must);
                if outgoing.current[at] {
                    continue;
                }
                if is_here && must && round == Round::Leave {
                    // The destination asks for it later, and its version is old.
                    outgoing.current[at] = true;
                    outgoing.left_at_source[at] = true;
                    plan.sent.left_at_source += 1;
                    if std::mem::take(&mut outgoing.there[at]) {
                        plan.purge.push(page);
                    }
                } else if is_here && (must || all) {
                    // Recorded before the read. If the page leaves meanwhile, that is recorded
                    // after this.
                    outgoing.there[at] = true;
                    outgoing.current[at] = true;
                    plan.send.push(page);
                } else if std::mem::take(&mut outgoing.there[at]) {
                    plan.purge.push(page);
                }
            }
        }
        plan.sent.pages = plan.send.len() as u64;
        plan.sent.purged = plan.purge.len() as u64;
        Ok(plan)
    }

    /// Sends pages. A zero page that the volume does not have is purged from the other engine
    /// instead.
    fn send(&self, pages: &[u64], sink: &mut Sink<'_>) -> Result<(), RegionError> {
        let mut buffer = vec![0; handover::PAGES as usize * PAGE_SIZE];
        for run in runs(pages.iter().copied()) {
            let mut first = run.start;
            while first < run.end {
                let end = run.end.min(first + handover::PAGES);
                let data = &mut buffer[..(end - first) as usize * PAGE_SIZE];
                let read = self.file.read(first, data);
                read.map_err(RegionError::io("cannot read the region's file"))?;
                self.send_some(first..end, data, sink)
                    .map_err(RegionError::io("cannot send to the other host"))?;
                first = end;
            }
        }
        Ok(())
    }

    fn send_some(&self, pages: Range<u64>, data: &[u8], sink: &mut Sink<'_>) -> io::Result<()> {
        let content = |page: u64| &data[(page - pages.start) as usize * PAGE_SIZE..][..PAGE_SIZE];
        let is_nothing = |page: &u64| is_zero(content(*page)) && !self.table.get(*page).stored;
        let (nothing, full): (Vec<_>, Vec<_>) = pages.clone().partition(is_nothing);
        if !nothing.is_empty() {
            sink(&Frame::Purge(as_runs(&nothing)), &[])?;
        }
        for run in runs(full) {
            let at = |page: u64| (page - pages.start) as usize * PAGE_SIZE;
            sink(&Frame::Pages(as_run(&run)), &data[at(run.start)..at(run.end)])?;
        }
        Ok(())
    }

    /// Sends the tags that changed since the last round, or all at first.
    fn send_tags(&self, sink: &mut Sink<'_>) -> Result<(), RegionError> {
        let fail = || RegionError::io("cannot send to the other host");
        // Says that tags come, even if all pages are zeroes.
        sink(&Frame::Tags(0), &[]).map_err(fail())?;
        for (extent, _) in self.lenders.extent_map.all() {
            let tags = self.lenders.volume.tags(extent);
            if tags.is_empty() {
                // The extent holds nothing any more.
                continue;
            }
            let before = match &mut lock(&self.cache).outgoing {
                Some(outgoing) => outgoing.tags.insert(extent, tags.clone()).unwrap_or_default(),
                None => return Err(not_begun()),
            };
            let mut first = extent.0 * PAGES_PER_EXTENT;
            for (at, block) in tags.chunks(TAGS).enumerate() {
                let known = before.get(at * TAGS..at * TAGS + block.len());
                if known.unwrap_or(&[0; TAGS]) != block {
                    let data: Vec<u8> = block.iter().flat_map(|tag| tag.to_le_bytes()).collect();
                    sink(&Frame::Tags(first), &data).map_err(fail())?;
                }
                first += block.len() as u64;
            }
        }
        Ok(())
    }

    /// Sends the states of all pages, the leases, and the places of the extents in them.
    fn send_states(&self, sink: &mut Sink<'_>) -> io::Result<()> {
        let mut first = 0;
        while first < self.table.pages() {
            let end = (first + handover::STATES).min(self.table.pages());
            let mut states = vec![0; (end - first).div_ceil(4) as usize];
            let cache = lock(&self.cache);
            let is_left = |page: u64| {
                let outgoing = cache.outgoing.as_ref();
                outgoing.is_some_and(|outgoing| outgoing.left_at_source[page as usize])
            };
            for page in first..end {
                let is = self.table.get(page);
                // If the volume does not have the page, the bit tells only of a page left behind.
                // Otherwise the page was sent, or is zero.
                let dirty = is.has_frame() && if is.stored { is.dirty } else { is_left(page) };
                let state = u8::from(is.stored) | u8::from(dirty) << 1;
                states[((page - first) / 4) as usize] |= state << ((page - first) % 4 * 2);
            }
            drop(cache);
            sink(&Frame::States(first), &states)?;
            first = end;
        }
        sink(&Frame::Leases, &serde_json::to_vec(&self.lenders.volume.targets())?)?;
        let extents = self.lenders.extent_map.all().map(|(extent, (lease, slot))| Extent {
            extent,
            lease,
            slot,
        });
        let extents: Vec<_> = extents.collect();
        extents.chunks(4096).try_for_each(|some| sink(&Frame::Extents(some.to_vec()), &[]))
    }

    /// Returns up to `most` pages that are in page tables here and that the other engine lacks in
    /// this version.
    pub fn hot(&self, most: u64) -> Vec<Run> {
        let cache = lock(&self.cache);
        let Some(outgoing) = &cache.outgoing else { return Vec::new() };
        let is_hot = |page: &u64| {
            self.table.get(*page).place == Place::Resident && !outgoing.current[*page as usize]
        };
        runs((0..self.table.pages()).filter(is_hot).take(most as usize))
            .iter()
            .map(as_run)
            .collect()
    }
}

fn not_begun() -> RegionError {
    RegionError::Misuse("the region is not being handed over".to_owned())
}

fn as_run(run: &Range<u64>) -> Run {
    Run { first: run.start, count: run.end - run.start }
}

pub(super) fn as_runs(pages: &[u64]) -> Vec<Run> {
    runs(pages.iter().copied()).iter().map(as_run).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;
    use crate::table::Page;

    /// \[Jo20\], Fig. 5: pages 1 to 8, of which four fit the cache.
    #[test]
    fn of_eight_pages_five_are_sent_where_eleven_were() {
        let engine = Engine::bare(9);
        let is = |page: u64, place, dirty| {
            let is = Page { place, stored: true, dirty, wanted: false, awaiting_source: false };
            engine.table.set(page, is);
        };
        let leaves = |page| {
            is(page, Place::Remote, false);
            lock(&engine.cache).outgoing.as_mut().unwrap().changed(&[page]);
        };
        (1..=8).for_each(|page| is(page, Place::Remote, false));
        (2..=5).for_each(|page| is(page, Place::Resident, true));
        engine.begin_outgoing().unwrap();
        let first = engine.plan(Round::Copy).unwrap();
        assert_eq!(first.send, [2, 3, 4, 5]);

        // Pages 2, 4 and 8 were written to. Pages 4, 5 and 7 are here then.
        leaves(2);
        leaves(3);
        leaves(8);
        lock(&engine.cache).outgoing.as_mut().unwrap().current[4] = false;
        is(7, Place::Resident, false);
        let second = engine.plan(Round::Copy).unwrap();
        assert_eq!((second.send.as_slice(), second.purge.as_slice()), (&[4][..], &[2, 3][..]));
        assert_eq!(first.sent.pages + second.sent.pages, 5);
    }

    #[test]
    fn pages_that_left_are_purged_from_the_destination() {
        let engine = Engine::bare(4);
        let is = |page: u64, place, stored, dirty| {
            let is = Page { place, stored, dirty, wanted: false, awaiting_source: false };
            engine.table.set(page, is);
        };
        is(0, Place::Resident, true, false);
        is(1, Place::Resident, true, false);
        is(2, Place::Unmapped, false, true);
        engine.begin_outgoing().unwrap();
        assert_eq!(engine.plan(Round::Copy).unwrap().send, [0, 1, 2]);
        assert!(engine.plan(Round::Copy).unwrap().send.is_empty());
        // Pages 0 and 1 left, were written to and left again; page 0 came back.
        lock(&engine.cache).outgoing.as_mut().unwrap().changed(&[0, 1]);
        is(1, Place::Remote, true, false);
        let plan = engine.plan(Round::Last).unwrap();
        assert!(plan.send.is_empty());
        assert_eq!(plan.purge, [0, 1]);
    }
}
