use std::fs::File;
use std::io;
use std::ops::Range;
use std::slice;

use aquifer_page::PAGE_SIZE;

use super::mapping::{self, Mapping};
use super::states::{ReadLock, States, WriteLock, assert_within};
use crate::span::runs;

/// The pages of a lease that shares none: a sparse tmpfs file, mapped, with a lock and a stored bit for each page.
///
/// Trap: merely reading a hole of a tmpfs file through a shared mapping allocates the page. So which pages are there is
/// kept in the page states, and the bytes of a page that is not stored are never looked at.
#[derive(Debug)]
pub(crate) struct OwnPages {
    file: File,
    data: Mapping,
    states: States,
    pages: usize,
}

impl OwnPages {
    /// Maps `file`, which is `pages` long and of which nothing is stored as far as the states know.
    pub(crate) fn map(file: File, pages: usize) -> io::Result<Self> {
        let data = Mapping::of_file(&file, 0, pages * PAGE_SIZE)?;
        Ok(Self { file, data, states: States::new(pages)?, pages })
    }

    /// Sees to it that stored pages are never swapped out.
    pub(crate) fn lock_in_ram(&self) -> io::Result<()> {
        self.data.lock_in_ram()
    }

    /// Marks what the file holds as stored. Returns the number of pages.
    pub(crate) fn adopt_stored(&mut self) -> io::Result<usize> {
        let mut found = 0;
        for pages in mapping::stored_runs(&self.file, self.pages)? {
            self.states.set_stored(&pages, true);
            found += pages.len();
        }
        Ok(found)
    }

    /// Maps the stored ones of `pages`, so that they are locked in RAM.
    pub(crate) fn map_stored(&self, pages: Range<usize>) -> io::Result<()> {
        // Held, so that nobody discards a page meanwhile: it would get RAM again.
        let held = self.read(pages.clone());
        let mut stored = runs(pages, |page| held.stored(page)).filter(|(_, stored)| *stored);
        stored.try_for_each(|(run, _)| self.data.populate_read(&run))
    }

    /// How many pages there can be.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// The first page of `pages` that is stored or held by somebody.
    pub(crate) fn first_not_idle(&self, pages: Range<usize>) -> Option<usize> {
        self.states.first_not_idle(pages)
    }

    /// Whether each page is stored just now.
    pub(crate) fn stored(&self, page: usize) -> bool {
        self.states.all()[page].stored()
    }

    /// Takes all of `pages` for reading, in ascending order.
    pub(crate) fn read(&self, pages: Range<usize>) -> OwnRead<'_> {
        OwnRead { own: self, lock: self.states.read(pages) }
    }

    /// Takes all of `pages` for reading if none needs waiting.
    pub(crate) fn try_read(&self, pages: Range<usize>) -> Option<OwnRead<'_>> {
        self.states.try_read(pages).map(|lock| OwnRead { own: self, lock })
    }

    /// Takes all of `pages` for writing, in ascending order.
    pub(crate) fn write(&self, pages: Range<usize>) -> OwnWrite<'_> {
        OwnWrite { own: self, lock: self.states.write(pages) }
    }
}

/// Pages held for reading.
#[derive(Debug)]
pub(crate) struct OwnRead<'a> {
    own: &'a OwnPages,
    lock: ReadLock<'a>,
}

impl OwnRead<'_> {
    /// All pages that are held.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.lock.pages.clone()
    }

    /// Whether this page is stored.
    pub(crate) fn stored(&self, page: usize) -> bool {
        self.own.stored(page)
    }

    /// The bytes of `pages`, all of which are held and stored.
    pub(crate) fn bytes(&self, pages: &Range<usize>) -> &[u8] {
        assert_within(pages, &self.lock.pages);
        let length = pages.len() * PAGE_SIZE;
        let start = self.own.data.at(pages.start * PAGE_SIZE, length);
        // SAFETY: inside the mapping; the read locks held for as long as `self` lives keep writers out.
        unsafe { slice::from_raw_parts(start, length) }
    }
}

/// Pages held for writing.
#[derive(Debug)]
pub(crate) struct OwnWrite<'a> {
    own: &'a OwnPages,
    lock: WriteLock<'a>,
}

impl OwnWrite<'_> {
    /// All pages that are held.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.lock.pages.clone()
    }

    /// The first run in `pages` that is stored, or that is not.
    pub(crate) fn next_run(&self, pages: Range<usize>, stored: bool) -> Option<Range<usize>> {
        assert_within(&pages, &self.lock.pages);
        self.own.states.peek_runs(pages).find(|&(_, is)| is == stored).map(|(run, _)| run)
    }

    /// Whether this page is stored.
    pub(crate) fn stored(&self, page: usize) -> bool {
        self.own.stored(page)
    }

    /// The bytes of `pages`, all of which are held and stored.
    pub(crate) fn bytes(&mut self, pages: &Range<usize>) -> &mut [u8] {
        assert_within(pages, &self.lock.pages);
        let length = pages.len() * PAGE_SIZE;
        let start = self.own.data.at(pages.start * PAGE_SIZE, length);
        // SAFETY: inside the mapping; the write locks held for as long as `self` lives keep everybody else out.
        unsafe { slice::from_raw_parts_mut(start, length) }
    }

    /// Gives RAM, full of zeroes, to `pages`, none of which is stored. All or nothing.
    ///
    /// `MADV_POPULATE_WRITE` because writing to a page that a full tmpfs cannot give is a SIGBUS, while this is an error.
    /// It also maps the page, without which `mlock` does not hold it in RAM. Measured for one random page, microseconds
    /// with the copy that follows: populate 2.9, `pwrite` and a touch to map it 4.6, `fallocate` 2.8 (but then a fault in
    /// the copy, and no gain for runs), just writing it 3.0.
    pub(crate) fn populate(&mut self, pages: &Range<usize>) -> io::Result<()> {
        assert_within(pages, &self.lock.pages);
        if let Err(error) = self.own.data.populate_write(pages) {
            mapping::punch(&self.own.file, pages)?;
            return Err(error);
        }
        self.own.states.set_stored(pages, true);
        Ok(())
    }

    /// Gives the RAM of `pages` back; they read as zeroes from now on.
    pub(crate) fn punch(&mut self, pages: &Range<usize>) -> io::Result<()> {
        assert_within(pages, &self.lock.pages);
        mapping::punch(&self.own.file, pages)?;
        self.own.states.set_stored(pages, false);
        Ok(())
    }
}
