//! Pages that are equal to pages of other regions of the group, and are kept once for all
//! (\[Kim14\], section 4.1).
//!
//! The scanner only proposes. The engine takes a page out of the page table. It compares the page
//! with the frame byte by byte, while no program can write to it. The program maps the frame only
//! after that. The kernel holds a write to it (see crate `region-client`) until the region has a
//! page of its own again.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use aquifer_page::{FrameIndex, PAGE_SIZE, PageIndex, is_zero};
use aquifer_region_client::{Run, Shared};
use serde::{Deserialize, Serialize};

use super::Engine;
use crate::counters::add;
use crate::engine::fault::FaultRequest;
use crate::error::RegionError;
use crate::file::runs;
use crate::frames::{Frames, Sharers};
use crate::lock;
use crate::program::{Program, Sharing};
use crate::table::{Page, Place};

/// The number of pages to unshare together.
const CHUNK: usize = 256;

/// A page that may be equal to a frame of the group, or all zeroes if `frame` is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    /// The page.
    pub page: PageIndex,
    /// The frame.
    pub frame: Option<FrameIndex>,
}

/// The result of proposals, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// Now shared.
    pub shared: u64,
    /// Zero pages that take no memory now.
    pub zero: u64,
    /// Not equal to the proposal, or written to meanwhile.
    pub differ: u64,
    /// On their way, absent, or not allowed to change now.
    pub busy: u64,
}

/// Pages that are being shared; the table lists them as leaving.
#[derive(Debug, Default)]
struct Taken {
    pages: Vec<u64>,
    frames: Vec<Option<FrameIndex>>,
}

/// The pages of the region that are kept once for the group.
#[derive(Debug)]
pub(super) struct GroupPages {
    /// The frame of the group behind each shared page.
    pub(super) sharers: Sharers,
    pub(super) frames: Frames,
    /// Held by a request that shares or unshares pages; a fault does not take it.
    pub(super) changing: Mutex<()>,
}

impl Engine {
    /// Shares the proposed pages with others of the group, if they are equal.
    ///
    /// # Errors
    /// A program's pages cannot be changed, or the frames cannot be read. Each page is then in its
    /// old place or shared.
    pub fn share(&self, proposals: &[Proposal]) -> Result<Merged, RegionError> {
        self.watch()?;
        let sharing = lock(&self.group.changing);
        let held = self
            .group
            .frames
            .hold()
            .map_err(RegionError::io("cannot lock the frames of the group"))?;
        let mut merged = Merged::default();
        let programs = self.programs();
        let may_share = self.is_complete() && self.pinned_by().is_none();
        let ([program], true) = (&*programs, may_share) else {
            // A program that is away cannot take orders. Of two programs, one would not see the
            // other's writes.
            merged.busy = proposals.len() as u64;
            return Ok(merged);
        };
        let taken = self.take_to_share(proposals);
        merged.busy = (proposals.len() - taken.pages.len()) as u64;
        if let Err(error) = self.unmap_to_share(&taken.pages) {
            self.come_back(&taken.pages);
            return Err(error);
        }
        let (equal, zero, others) = match self.compare(&taken) {
            Ok(sorted) => sorted,
            Err(error) => {
                self.stay(&taken.pages);
                return Err(error);
            }
        };
        merged.differ = others.len() as u64;
        self.stay(&others);
        let shared = self.map_shared(program, &equal);
        // Dropped first, as the next step may wait for a lender.
        drop((held, sharing));
        let dropped = self.leave(self.control_worker(), &zero);
        merged.zero = zero.iter().filter(|page| !self.table.get(**page).has_frame()).count() as u64;
        add(&self.counters.zero_merged, merged.zero as usize);
        merged.shared = shared?;
        merged.differ += equal.len() as u64 - merged.shared;
        add(&self.counters.merged, merged.shared as usize);
        dropped.map(|()| merged)
    }

    fn take_to_share(&self, proposals: &[Proposal]) -> Taken {
        let mut wanted = proposals.to_vec();
        wanted.sort_unstable_by_key(|proposal| proposal.page);
        wanted.dedup_by_key(|proposal| proposal.page);
        let mut taken = Taken::default();
        let mut cache = lock(&self.cache);
        if self.is_frozen() || cache.outgoing.is_some() {
            return taken;
        }
        for Proposal { page: PageIndex(page), frame } in wanted {
            let is = if page < self.table.pages() { self.table.get(page) } else { continue };
            if self.group.sharers.get(page).is_some() {
                continue;
            }
            if !matches!(is.place, Place::Resident | Place::Unmapped) {
                continue;
            }
            self.take(&mut cache, page, is, Place::Leaving);
            taken.pages.push(page);
            taken.frames.push(frame);
        }
        taken
    }

    fn unmap_to_share(&self, pages: &[u64]) -> Result<(), RegionError> {
        let unproven = self
            .unmap(pages, false)
            .map_err(RegionError::io("cannot unmap pages from a program"))?;
        let _cache = lock(&self.cache);
        for page in pages {
            let is = self.table.get(*page);
            self.table.set(*page, Page { dirty: is.dirty || unproven.contains(page), ..is });
        }
        Ok(())
    }

    /// Sorts the pages into those equal to their frames, those of zeroes, and the others.
    #[expect(clippy::type_complexity, reason = "three lists that live for a moment")]
    fn compare(
        &self,
        taken: &Taken,
    ) -> Result<(Vec<(u64, FrameIndex)>, Vec<u64>, Vec<u64>), RegionError> {
        let (mut equal, mut zero, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let [mut here, mut there] = [vec![0; PAGE_SIZE], vec![0; PAGE_SIZE]];
        for (page, frame) in taken.pages.iter().copied().zip(&taken.frames) {
            let read = self.file.read(page, &mut here);
            read.map_err(RegionError::io("cannot read the region's file"))?;
            match *frame {
                None if is_zero(&here) => zero.push(page),
                None => others.push(page),
                Some(frame) => {
                    let read = self.group.frames.read(frame, &mut there);
                    read.map_err(RegionError::io("cannot read a frame of the group"))?;
                    // A frame of zeroes was freed since the proposal.
                    if here == there && !is_zero(&here) {
                        equal.push((page, frame))
                    } else {
                        others.push(page)
                    }
                }
            }
        }
        // Dirty, so that a fetch of the lenders' old version is impossible.
        let _cache = lock(&self.cache);
        for page in &zero {
            let is = self.table.get(*page);
            self.table.set(*page, Page { dirty: true, ..is });
        }
        Ok((equal, zero, others))
    }

    /// Makes the program map these leaving pages from their frames. Returns how many are shared.
    fn map_shared(
        &self,
        program: &Arc<Program>,
        equal: &[(u64, FrameIndex)],
    ) -> Result<u64, RegionError> {
        if equal.is_empty() {
            return Ok(0);
        }
        let pages: Vec<u64> = equal.iter().map(|(page, _)| *page).collect();
        // Recorded first, so that a later engine knows which pages may be shared.
        equal.iter().for_each(|(page, frame)| self.group.sharers.set(*page, Some(*frame)));
        let done = self
            .group
            .frames
            .file()
            .and_then(|frames| program.share(&as_shared(equal), &frames, self.file.file()));
        let written = match done {
            Ok(Sharing::Done(written)) => written,
            Ok(Sharing::Gone) => {
                self.are_own(&pages);
                self.stay(&pages);
                return Ok(0);
            }
            Err(error) => {
                // Some of the pages may already be shared.
                if program.restore(&runs(pages.iter().copied()), self.file.file()).is_ok() {
                    self.are_own(&pages);
                }
                self.come_back(&pages);
                return Err(RegionError::io("cannot share pages of a program")(error));
            }
        };
        let (back, shared): (Vec<_>, Vec<_>) =
            pages.into_iter().partition(|page| written.contains(page));
        self.are_own(&back);
        self.come_back(&back);
        let (gone, stuck) = self.punch(&shared);
        self.are_shared(gone);
        if let Some((stuck, error)) = stuck {
            if program.restore(&runs(stuck.iter().copied()), self.file.file()).is_ok() {
                self.are_own(stuck);
            }
            self.come_back(stuck);
            return Err(error);
        }
        Ok(shared.len() as u64)
    }

    fn are_own(&self, pages: &[u64]) {
        pages.iter().for_each(|page| self.group.sharers.set(*page, None));
    }

    /// Completes the share of these pages, which were leaving and are no longer in the file.
    fn are_shared(&self, pages: &[u64]) {
        let mut cache = lock(&self.cache);
        let mut wanted = Vec::new();
        for page in pages {
            let is = self.table.get(*page);
            if is.wanted {
                wanted.push(*page);
            }
            self.table.set(*page, Page { wanted: false, ..is.at(Place::Shared) });
        }
        cache.frames -= pages.len() as u64;
        drop(cache);
        self.arrived(&wanted);
    }

    /// Puts leaving pages back into their place in the file. They may be mapped, and count as
    /// written to.
    fn come_back(&self, pages: &[u64]) {
        for page in pages {
            let is = self.table.get(*page);
            self.complete_fill(
                *page,
                Page { dirty: true, wanted: false, ..is.at(Place::Resident) },
                false,
            );
        }
    }

    /// Unshares a page on a write, or on a touch through another mapping.
    pub(super) fn break_cow(&self, request: &FaultRequest) -> Result<(), RegionError> {
        let (program, page) = (&request.program, request.page);
        // A program with many mappings gets whole stretches back, which removes one mapping each.
        let pages = if program.process.is_crowded() { self.stretch(page) } else { page..page + 1 };
        self.unshare_for(&pages.collect::<Vec<_>>(), Some(request))?;
        add(&self.counters.cow_breaks, 1);
        program.wake(&(page..page + 1));
        Ok(())
    }

    /// Unshares a page that is filling and in the file. Earlier, a program could not be told to map
    /// it from there.
    pub(super) fn finish_unshare(&self, request: &FaultRequest) -> Result<(), RegionError> {
        self.map_own(&[request.page], Some(request))?;
        request.program.wake(&(request.page..request.page + 1));
        Ok(())
    }

    /// Unshares those of these pages that are shared, back into the region's file. The cache may
    /// exceed its limit by them.
    ///
    /// # Errors
    /// The memory is short, or a program refuses. The pages stay shared.
    pub(super) fn unshare(&self, pages: &[u64]) -> Result<(), RegionError> {
        self.unshare_for(pages, None)
    }

    /// Does the same, and maps the touched page before any of the pages can leave again.
    fn unshare_for(
        &self,
        pages: &[u64],
        request: Option<&FaultRequest>,
    ) -> Result<(), RegionError> {
        for pages in pages.chunks(CHUNK) {
            let mut cache = lock(&self.cache);
            let mut pages: Vec<u64> =
                pages.iter().copied().filter(|page| self.is_shared(*page)).collect();
            if pages.is_empty() {
                continue;
            }
            if !self.is_complete_now(&mut cache) {
                drop(cache);
                self.wait_for_programs(request)?;
                cache = lock(&self.cache);
                pages.retain(|page| self.is_shared(*page));
            }
            pages.sort_unstable();
            for page in &pages {
                self.take(&mut cache, *page, self.table.get(*page), Place::Filling);
            }
            self.see_to_room(&mut cache);
            drop(cache);
            if let Err(error) = self.put_own(&pages) {
                // Back to shared. A page that stays in the file is found there by a later engine,
                // and is equal.
                let _ = self.punch(&pages);
                self.are_shared(&pages);
                return Err(error);
            }
            self.map_own(&pages, request)?;
        }
        Ok(())
    }

    /// Waits until all programs that may have pages mapped take orders. With a request, returns an
    /// error at once, and the fault is retried.
    fn wait_for_programs(&self, request: Option<&FaultRequest>) -> Result<(), RegionError> {
        if request.is_none() {
            return self.wait_until(Self::is_complete);
        }
        if self.is_complete() { Ok(()) } else { Err(RegionError::Refused(self.describe_wait())) }
    }

    /// Returns the shared pages that are mapped together with this one, from it to the nearer end.
    fn stretch(&self, page: u64) -> Range<u64> {
        let frame = self.group.sharers.get(page);
        let belongs = |other: &u64| {
            let is = frame.and_then(|frame| (frame.0 + other).checked_sub(page)).map(FrameIndex);
            is.is_some() && self.is_shared(*other) && self.group.sharers.get(*other) == is
        };
        let before = (0..page).rev().take_while(belongs);
        let behind = (page + 1..self.table.pages()).take_while(belongs);
        // The distance to the nearer end, as `zip` stops there.
        let shorter = before.zip(behind).count() as u64;
        match page.checked_sub(shorter + 1) {
            Some(other) if belongs(&other) => page..page + 1 + shorter,
            _ => page - shorter..page + 1,
        }
    }

    /// Makes the programs map these filling pages from the file. If a program refuses, it still
    /// reads the equal frame, and its next write faults again.
    fn map_own(&self, pages: &[u64], request: Option<&FaultRequest>) -> Result<(), RegionError> {
        let restored = self.restore(pages);
        if restored.is_ok() {
            // A program that is away may have the frame mapped, and gets the order when it is back.
            if self.is_complete() {
                self.are_own(pages);
            }
            // Saves the program's next fault. If this fails, the program faults.
            if let Some(request) = request.filter(|request| pages.contains(&request.page)) {
                let _ = request.program.map(request.page, false);
            }
        }
        self.come_back(pages);
        restored
    }

    fn put_own(&self, pages: &[u64]) -> Result<(), RegionError> {
        let mut buffer = vec![0; PAGE_SIZE];
        for page in pages {
            let frame = self.group.sharers.get(*page);
            let frame =
                frame.ok_or_else(|| RegionError::Refused(format!("page {page} has no frame")))?;
            let put = self
                .group
                .frames
                .read(frame, &mut buffer)
                .and_then(|()| self.file.put(*page, &buffer));
            put.map_err(RegionError::io("cannot copy a shared page"))?;
        }
        Ok(())
    }

    /// Makes all programs map these pages from the region's file.
    fn restore(&self, pages: &[u64]) -> Result<(), RegionError> {
        let runs = runs(pages.iter().copied());
        for program in self.programs() {
            let restored = program.restore(&runs, self.file.file());
            restored.map_err(RegionError::io("cannot map the region's own pages in a program"))?;
        }
        Ok(())
    }

    /// Unshares all shared pages.
    ///
    /// # Errors
    /// The memory is short, or a program refuses. The remaining pages stay shared.
    pub fn unshare_all(&self) -> Result<(), RegionError> {
        let _sharing = lock(&self.group.changing);
        loop {
            let shared: Vec<u64> = self.group.sharers.all().map(|(page, _)| page.0).collect();
            self.unshare(&shared)?;
            let cache = lock(&self.cache);
            // A page that is on its way to a lender returns to shared after the write.
            if !shared
                .iter()
                .any(|page| !self.table.get(*page).is_in_place() || self.is_shared(*page))
            {
                return Ok(());
            }
            self.wait_for_change(cache);
        }
    }

    fn is_shared(&self, page: u64) -> bool {
        self.table.get(page).place == Place::Shared
    }

    /// Reads a page from the file or its frame, while programs may write to it.
    pub(super) fn read_here(&self, page: u64, was: Page, into: &mut [u8]) -> std::io::Result<()> {
        match self.group.sharers.get(page) {
            Some(frame) if was.place == Place::Shared => self.group.frames.read(frame, into),
            _ => self.file.read(page, into),
        }
    }

    /// Maps pages from the region's file that an earlier engine was about to share or unshare. A
    /// program that has reattached may have them mapped otherwise.
    ///
    /// # Errors
    /// A program refuses, so its mapping is unknown.
    pub(super) fn restore_shared(&self) -> Result<(), RegionError> {
        if self.group.sharers.all().next().is_none() {
            return Ok(());
        }
        let _sharing = lock(&self.group.changing);
        let pages: Vec<u64> = self.group.sharers.all().map(|(page, _)| page.0).collect();
        self.restore_unsure(&pages)
    }

    /// Does the same for those of these pages that are in the region's file.
    fn restore_unsure(&self, pages: &[u64]) -> Result<(), RegionError> {
        let mut unsure = Vec::new();
        for page in pages {
            let (mut cache, is) = self.lock_in_place(*page);
            if !is.has_frame() || self.group.sharers.get(*page).is_none() {
                continue;
            }
            self.take(&mut cache, *page, is, Place::Filling);
            unsure.push(*page);
        }
        if unsure.is_empty() { Ok(()) } else { self.map_own(&unsure, None) }
    }

    /// Unshares these pages, which are about to be discarded.
    pub(super) fn unshare_for_discard(&self, pages: Range<u64>) -> Result<(), RegionError> {
        let has_frame = |page: &u64| self.group.sharers.get(*page).is_some();
        let shared: Vec<u64> = pages.filter(has_frame).collect();
        if shared.is_empty() {
            return Ok(());
        }
        self.wait_for_programs(None)?;
        if !self.programs().is_empty() {
            self.unshare(&shared)?;
            return self.restore_unsure(&shared);
        }
        // No program has them mapped, so they need not return to the file first.
        let _cache = lock(&self.cache);
        for page in shared {
            let is = self.table.get(page);
            if is.is_in_place() {
                self.group.sharers.set(page, None);
            }
            if is.place == Place::Shared {
                self.table.set(page, is.without_frame());
            }
        }
        Ok(())
    }
}

/// Groups pages into runs with consecutive frames.
fn as_shared(equal: &[(u64, FrameIndex)]) -> Vec<Shared> {
    let mut all: Vec<Shared> = Vec::new();
    for (page, frame) in equal.iter().copied() {
        match all.last_mut() {
            Some(Shared { pages, frame: first })
                if pages.end() == page && first.0 + pages.count == frame.0 =>
            {
                pages.count += 1;
            }
            _ => all.push(Shared { pages: Run { first: page, count: 1 }, frame }),
        }
    }
    all
}
