use std::fs::File;
use std::io;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use aquifer_page::PAGE_SIZE;

use super::mapping::{self, Mapping};
use super::states::{ReadLock, States, WriteLock, assert_within};

/// What an entry says of a page that is a hole. No frame has this number.
pub(crate) const HOLE: u32 = 0;
/// What an entry says of a page whose contents were found to be lost. No frame has this number.
pub(crate) const LOST: u32 = u32::MAX;

/// Entries in a page of the table.
const ENTRIES: usize = PAGE_SIZE / size_of::<u32>();

/// The page table of a lease that shares: in which frame of its group each page is. A sparse tmpfs file of a `u32` a
/// page, mapped, with a lock and a stored bit for each page.
///
/// The stored bit says whether the entry is a frame. Entries of a part of the file that is a hole are never looked at:
/// that would allocate it, and kill us by SIGBUS where the tmpfs is full.
#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    entries: Mapping,
    /// Which pages of the file are there. They stay until the table goes: a thousandth of what is stored.
    there: Box<[AtomicBool]>,
    states: States,
    pages: usize,
}

impl Table {
    /// Bytes in the file of a table for `pages` pages.
    pub(crate) fn file_length(pages: usize) -> u64 {
        (pages.div_ceil(ENTRIES) * PAGE_SIZE) as u64
    }

    /// Maps `file`, a table of `pages` holes as far as the states know.
    pub(crate) fn map(file: File, pages: usize) -> io::Result<Self> {
        // A table that somebody has emptied is found out by who knows how long it should be.
        let parts = pages.div_ceil(ENTRIES).max(1);
        let entries = Mapping::of_file(&file, 0, parts * PAGE_SIZE)?;
        let there = (0..parts).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { file, entries, there, states: States::new(pages)?, pages })
    }

    /// Sees to it that the table is never swapped out.
    pub(crate) fn lock_in_ram(&self) -> io::Result<()> {
        self.entries.lock_in_ram()
    }

    /// Adopts the entries in the file: `keep` says what each that is not a hole becomes. Returns how many pages are
    /// stored then.
    pub(crate) fn adopt(&mut self, mut keep: impl FnMut(usize, u32) -> u32) -> io::Result<usize> {
        let mut found = 0;
        for parts in mapping::stored_runs(&self.file, self.there.len())? {
            self.entries.populate_read(&parts)?;
            self.there[parts.clone()].iter().for_each(|there| there.store(true, Ordering::Relaxed));
            for page in parts.start * ENTRIES..(parts.end * ENTRIES).min(self.pages) {
                let entry = self.entries()[page].load(Ordering::Relaxed);
                if entry != HOLE {
                    self.entries()[page].store(keep(page, entry), Ordering::Relaxed);
                    self.states.set_stored(&(page..page + 1), true);
                    found += 1;
                }
            }
        }
        Ok(found)
    }

    fn entries(&self) -> &[AtomicU32] {
        // SAFETY: the mapping has at least `pages` entries, is page-aligned and only ever used through this function;
        // any bits are a valid entry.
        unsafe { slice::from_raw_parts(self.entries.base().cast(), self.pages) }
    }

    /// Pages of the lease.
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

    fn entry(&self, page: usize) -> u32 {
        if self.stored(page) { self.entries()[page].load(Ordering::Relaxed) } else { HOLE }
    }

    /// Takes all of `pages` for reading, in ascending order.
    pub(crate) fn read(&self, pages: Range<usize>) -> TableRead<'_> {
        TableRead { table: self, lock: self.states.read(pages) }
    }

    /// Takes all of `pages` for reading if none needs waiting.
    pub(crate) fn try_read(&self, pages: Range<usize>) -> Option<TableRead<'_>> {
        self.states.try_read(pages).map(|lock| TableRead { table: self, lock })
    }

    /// Takes all of `pages` for writing, in ascending order.
    pub(crate) fn write(&self, pages: Range<usize>) -> TableWrite<'_> {
        TableWrite { table: self, lock: self.states.write(pages) }
    }
}

/// Entries held for reading.
#[derive(Debug)]
pub(crate) struct TableRead<'a> {
    table: &'a Table,
    lock: ReadLock<'a>,
}

impl TableRead<'_> {
    /// All pages that are held.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.lock.pages.clone()
    }

    /// The frame of a page that is held, or [`HOLE`].
    pub(crate) fn entry(&self, page: usize) -> u32 {
        assert_within(&(page..page + 1), &self.lock.pages);
        self.table.entry(page)
    }
}

/// Entries held for writing.
#[derive(Debug)]
pub(crate) struct TableWrite<'a> {
    table: &'a Table,
    lock: WriteLock<'a>,
}

impl TableWrite<'_> {
    /// All pages that are held.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.lock.pages.clone()
    }

    /// The frame of a page that is held, or [`HOLE`].
    pub(crate) fn entry(&self, page: usize) -> u32 {
        assert_within(&(page..page + 1), &self.lock.pages);
        self.table.entry(page)
    }

    /// Sees to it that there is room for the page's entry, so that [`set`](Self::set) cannot fail.
    pub(crate) fn make_room(&mut self, page: usize) -> io::Result<()> {
        let part = page / ENTRIES;
        let there = &self.table.there[part];
        if !there.load(Ordering::Relaxed) {
            self.table.entries.populate_write(&(part..part + 1))?;
            there.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Has the page be in `frame`, or be a [`HOLE`]. There is room for its entry.
    ///
    /// Release: who finds the entry after a crash finds the frame as it was filled before.
    pub(crate) fn set(&mut self, page: usize, frame: u32) {
        assert_within(&(page..page + 1), &self.lock.pages);
        assert!(self.table.there[page / ENTRIES].load(Ordering::Relaxed), "room for the entry");
        self.table.entries()[page].store(frame, Ordering::Release);
        self.table.states.set_stored(&(page..page + 1), frame != HOLE);
    }
}
