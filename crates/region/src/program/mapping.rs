//! The place of a region in the memory of a program, and the page table there.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use aquifer_page::PAGE_SIZE;
use aquifer_region_client::{Attach, Live, Run};

use crate::{effect, sys};

/// The most runs of pages that one scan of a pagemap returns.
const SCANNED: usize = if cfg!(test) { 4 } else { 64 };

/// The mapped pages of a program.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) address: u64,
    pages: Run,
    /// The pages that are still mapped. Read-locked while a page is put there, and write-locked
    /// before an unmap.
    live: Arc<RwLock<Live>>,
    pagemap: File,
}

impl Mapping {
    /// Makes the engine's view of a new mapping. `before` is the same by an earlier connection.
    pub(super) fn new(attach: &Attach, pid: u32, before: Option<&Self>) -> io::Result<Self> {
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        // Both share one list, as a worker may be about to put a page there for the other.
        let live = before.map(|before| before.live.clone()).unwrap_or_default();
        let this = Self { address: attach.address, pages: attach.pages, live, pagemap };
        *this.live_mut() = Live::new(&attach.live);
        Ok(this)
    }

    /// Returns all pages of the mapping, unmapped since or not.
    pub(super) fn pages(&self) -> Range<u64> {
        self.pages.first..self.pages.end()
    }

    pub(super) fn live(&self) -> RwLockReadGuard<'_, Live> {
        self.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_mut(&self) -> RwLockWriteGuard<'_, Live> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the program is about to unmap these pages. The engine puts nothing there any
    /// more.
    pub(crate) fn release(&self, pages: &Range<u64>) {
        self.live_mut().remove(pages);
    }

    /// Returns the page of the region at an address, or `None` outside the mapping.
    pub(crate) fn page(&self, address: u64) -> Option<u64> {
        let page = address.checked_sub(self.address)? / PAGE_SIZE as u64;
        (page < self.pages.count).then_some(self.pages.first + page)
    }

    /// Returns the addresses of these pages, as far as they are in the mapping.
    pub(super) fn addresses(&self, pages: &Range<u64>) -> Range<u64> {
        let at = |page: u64| {
            let page = page.clamp(self.pages.first, self.pages.end()) - self.pages.first;
            self.address + page * PAGE_SIZE as u64
        };
        at(pages.start)..at(pages.end)
    }

    /// Adds the mapped pages with no mark of "not written since armed".
    pub(super) fn unwritten(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> io::Result<()> {
        let live = self.live();
        runs.iter()
            .flat_map(|run| live.parts(run))
            .try_for_each(|part| self.unwritten_in(&part, into))
    }

    fn unwritten_in(&self, pages: &Range<u64>, into: &mut HashSet<u64>) -> io::Result<()> {
        let mut found = [sys::page_region { start: 0, end: 0, categories: 0 }; SCANNED];
        let Range { mut start, end } = self.addresses(pages);
        while start < end {
            effect::at("scan");
            let (count, walked) = match sys::scan_unwritten(&self.pagemap, start..end, &mut found) {
                // The process has ended, and its page table with it.
                Err(error) if has_ended(&error) => (0, end),
                looked => looked?,
            };
            for region in &found[..count] {
                into.extend(self.pages_at(start..region.start));
                start = region.end;
            }
            // A scan ends early when `found` is full.
            let walked = if walked <= start && count == 0 { end } else { walked };
            into.extend(self.pages_at(start..walked));
            start = start.max(walked);
        }
        Ok(())
    }

    /// Adds those of the pages that are in its page table.
    pub(crate) fn present(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> io::Result<()> {
        let live = self.live();
        let mut found = |found: Range<u64>| into.extend(self.pages_at(found));
        let mut parts = runs.iter().flat_map(|run| live.parts(run));
        parts.try_for_each(|part| each_present(&self.pagemap, self.addresses(&part), &mut found))
    }

    /// Arms the marks of these pages, so that the kernel marks the next write to each.
    pub(crate) fn notice_writes(&self, runs: &[Range<u64>]) -> io::Result<()> {
        let live = self.live();
        for part in runs.iter().flat_map(|run| live.parts(run)) {
            let Range { mut start, end } = self.addresses(&part);
            while start < end {
                effect::at("notice writes");
                let walked = match sys::notice_writes(&self.pagemap, start..end) {
                    // The process has ended and writes no more.
                    Err(error) if has_ended(&error) => return Ok(()),
                    noticed => noticed?,
                };
                if walked <= start {
                    break;
                }
                start = walked;
            }
        }
        Ok(())
    }

    /// Returns the pages at these addresses, which are in its mapping.
    fn pages_at(&self, addresses: Range<u64>) -> Range<u64> {
        let page = |address: u64| self.pages.first + (address - self.address) / PAGE_SIZE as u64;
        page(addresses.start)..page(addresses.end.max(addresses.start))
    }
}

fn has_ended(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Calls `each` for the ranges of these addresses that are in the process's page table.
pub(crate) fn each_present(
    pagemap: &File,
    Range { mut start, end }: Range<u64>,
    mut each: impl FnMut(Range<u64>),
) -> io::Result<()> {
    let mut found = [sys::page_region { start: 0, end: 0, categories: 0 }; SCANNED];
    while start < end {
        let (count, walked) = match sys::scan_present(pagemap, start..end, &mut found) {
            // The process has ended.
            Err(error) if has_ended(&error) => return Ok(()),
            looked => looked?,
        };
        found[..count].iter().for_each(|region| each(region.start..region.end));
        if walked <= start {
            break;
        }
        start = walked;
    }
    Ok(())
}
