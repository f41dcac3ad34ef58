//! Large folios are split before the first page leaves.
//!
//! The kernel may back an unwatched region with huge pages, which are large folios. A hole that is
//! punched into a part of one zeroes that part first, and only then splits the folio. If the kernel
//! cannot split it, the zeroes stay in the file (mm/truncate.c of Linux,
//! `truncate_inode_partial_folio`). The page from the lender could not take their place.

use std::io;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{HUGE_PAGE_SIZE, PAGE_SIZE};
use aquifer_store::tmpfs;

use super::Engine;
use crate::folios::Folios;

/// The most pages in a folio. A folio's first page is a multiple of its number of pages.
const LARGEST: u64 = (HUGE_PAGE_SIZE / PAGE_SIZE) as u64;

/// How long the kernel may refuse to split a folio, as some thread uses it.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the engine tries to split it.
const SPLIT_INTERVAL: Duration = Duration::from_millis(1);

impl Engine {
    /// Splits all large folios of the file. No program may get new ones meanwhile, and no page may
    /// leave the file.
    pub(super) fn split_folios(&self) -> io::Result<()> {
        let present = self.file.present()?;
        if present.is_empty() || !tmpfs::may_have_huge_pages(self.file.device()?) {
            return Ok(());
        }
        let folios = Folios::open()?;
        for Range { mut start, end } in present {
            while start < end {
                let block = start..end.min((start / LARGEST + 1) * LARGEST);
                start = block.end;
                self.split_block(&folios, &block)?;
            }
        }
        Ok(())
    }

    fn split_block(&self, folios: &Folios, block: &Range<u64>) -> io::Result<()> {
        let deadline = Instant::now() + SPLIT_TIMEOUT;
        let mut is_first = true;
        while let Some(page) = self.split_some(folios, block)? {
            if Instant::now() > deadline {
                return Err(io::Error::other(format!(
                    "the kernel does not split the huge page at page {page} of the region: some \
                     program or device uses it; try again later"
                )));
            }
            // The kernel splits no folio that two processes have mapped. Watched programs that
            // touch the pages get them back.
            for program in self.programs().iter().filter(|program| !program.is_silent()) {
                match program.unmap(std::slice::from_ref(block)) {
                    Err(_) if program.is_silent() => {}
                    unmapped => unmapped?,
                }
            }
            if !std::mem::take(&mut is_first) {
                thread::sleep(SPLIT_INTERVAL);
            }
        }
        Ok(())
    }

    /// Tries to split the large folios among these pages. Returns a page of one that is left.
    fn split_some(&self, folios: &Folios, block: &Range<u64>) -> io::Result<Option<u64>> {
        // A discard in between would leave a page of zeroes.
        let _no_discard = self.watching.stop_discards();
        for run in self.file.present_in(block)? {
            let split = self.split_run(folios, &run);
            self.file.unmap(&run)?;
            if let Some(page) = split? {
                return Ok(Some(page));
            }
        }
        Ok(None)
    }

    fn split_run(&self, folios: &Folios, run: &Range<u64>) -> io::Result<Option<u64>> {
        let large = || {
            self.file.populate(run)?;
            folios.large(self.file.address(run.start), run.end - run.start)
        };
        let found = large()?;
        if found.is_empty() {
            return Ok(None);
        }
        for page in found {
            self.file.split(run.start + page)?;
        }
        Ok(large()?.first().map(|page| run.start + page))
    }
}
