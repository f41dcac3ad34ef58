//! The mapped file of a lease that does not share.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::slice;

use aquifer_page::PAGE_SIZE;

use super::held::{Held, LeasePages, READ, WRITE};
use super::mapping::{self, Mapping};
use super::states::States;
use crate::span::runs;

/// The pages of a lease that does not share: a sparse tmpfs file, mapped, with a lock and a stored
/// bit for each page.
///
/// Trap: even a read of a hole through a shared mapping of a tmpfs file allocates the page. So the
/// page states say which pages are stored, and nothing reads the bytes of other pages.
#[derive(Debug)]
pub(crate) struct PrivatePages {
    file: File,
    data: Mapping,
    states: States,
}

impl PrivatePages {
    /// Maps `file`, which is `pages` long; marks no page as stored.
    pub(crate) fn map(file: File, pages: usize) -> io::Result<Self> {
        let data = Mapping::of_file(&file, 0, pages * PAGE_SIZE)?;
        Ok(Self { file, data, states: States::new(pages)? })
    }

    /// Keeps stored pages from being swapped out.
    pub(crate) fn lock_in_ram(&self) -> io::Result<()> {
        self.data.lock_in_ram()
    }

    /// Marks the pages that the file holds as stored. Returns their number.
    pub(crate) fn adopt_stored(&mut self) -> io::Result<usize> {
        let mut found = 0;
        for pages in mapping::stored_runs(&self.file, self.pages())? {
            self.states.set_stored(&pages, true);
            found += pages.len();
        }
        Ok(found)
    }

    /// Maps the stored pages among `pages`, so that the kernel locks them in RAM.
    pub(crate) fn map_stored(&self, pages: Range<usize>) -> io::Result<()> {
        // Held, as mapping a page that another thread discards meanwhile would allocate it again.
        let held = self.read(pages.clone());
        let mut stored = runs(pages, |page| held.stored(page)).filter(|(_, stored)| *stored);
        stored.try_for_each(|(run, _)| self.data.populate_read(&run))
    }
}

impl LeasePages for PrivatePages {
    fn states(&self) -> &States {
        &self.states
    }
}

/// Pages held for reading.
pub(crate) type PrivateRead<'a> = Held<'a, PrivatePages, READ>;
/// Pages held for writing.
pub(crate) type PrivateWrite<'a> = Held<'a, PrivatePages, WRITE>;

impl PrivateRead<'_> {
    /// Returns the bytes of `pages`, all of them held and stored.
    pub(crate) fn bytes(&self, pages: &Range<usize>) -> &[u8] {
        self.assert_held(pages);
        let length = pages.len() * PAGE_SIZE;
        let start = self.of.data.at(pages.start * PAGE_SIZE, length);
        // SAFETY: inside the mapping; the read locks held for as long as `self` lives keep writers
        // out.
        unsafe { slice::from_raw_parts(start, length) }
    }
}

impl PrivateWrite<'_> {
    /// Returns the first run in `pages` whose stored bits equal `stored`.
    pub(crate) fn next_run(&self, pages: Range<usize>, stored: bool) -> Option<Range<usize>> {
        self.assert_held(&pages);
        self.of.states.peek_runs(pages).find(|&(_, is)| is == stored).map(|(run, _)| run)
    }

    /// Returns the bytes of `pages`, all of them held and stored.
    pub(crate) fn bytes(&mut self, pages: &Range<usize>) -> &mut [u8] {
        self.assert_held(pages);
        let length = pages.len() * PAGE_SIZE;
        let start = self.of.data.at(pages.start * PAGE_SIZE, length);
        // SAFETY: inside the mapping; the write locks held for as long as `self` lives keep all
        // other threads out.
        unsafe { slice::from_raw_parts_mut(start, length) }
    }

    /// Takes RAM, full of zeroes, for `pages`, none of which is stored. On an error, none of them
    /// keeps RAM.
    ///
    /// `MADV_POPULATE_WRITE`, because a write to a page that a full tmpfs cannot give is a SIGBUS,
    /// while this is an error. It also maps the page; `mlock` holds only mapped pages in RAM.
    /// Microseconds for one random page, with the copy that follows: populate 2.9; `pwrite` and a
    /// touch to map it 4.6; a plain write 3.0. `fallocate` takes 2.8, but then the copy faults, and
    /// runs gain nothing.
    pub(crate) fn populate(&mut self, pages: &Range<usize>) -> io::Result<()> {
        self.assert_held(pages);
        if let Err(error) = self.of.data.populate_write(pages) {
            mapping::punch(&self.of.file, pages)?;
            return Err(error);
        }
        self.of.states.set_stored(pages, true);
        Ok(())
    }

    /// Frees the RAM of `pages`; they then read as zeroes.
    pub(crate) fn punch(&mut self, pages: &Range<usize>) -> io::Result<()> {
        self.assert_held(pages);
        mapping::punch(&self.of.file, pages)?;
        self.of.states.set_stored(pages, false);
        Ok(())
    }
}
