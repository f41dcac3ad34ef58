//! The mapped page table of a lease that shares.

use std::fs::File;
use std::io;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use aquifer_page::PAGE_SIZE;

use super::held::{Held, LeasePages, READ, WRITE};
use super::mapping::{self, Mapping};
use super::states::States;

/// The entry of a hole. No frame has this number.
pub(crate) const HOLE: u32 = 0;
/// The entry of a page whose contents are lost. No frame has this number.
pub(crate) const LOST: u32 = u32::MAX;

/// Entries in a page of the table.
const ENTRIES: usize = PAGE_SIZE / size_of::<u32>();

/// The page table of a lease that shares: the frame of each page. A sparse tmpfs file, mapped, with
/// a `u32`, a lock and a stored bit for each page.
///
/// The stored bit says whether the entry is a frame. Nothing reads entries where the file has a
/// hole: that would allocate a page, and be a SIGBUS on a full tmpfs.
#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    entries: Mapping,
    /// Which pages of the file are allocated. They stay until the table goes: a thousandth of the
    /// stored data.
    there: Box<[AtomicBool]>,
    states: States,
}

impl Table {
    /// Returns the length in bytes of a table's file for `pages` pages.
    pub(crate) fn file_length(pages: usize) -> u64 {
        (pages.div_ceil(ENTRIES) * PAGE_SIZE) as u64
    }

    /// Maps `file`, a table of `pages` pages; marks none as stored.
    pub(crate) fn map(file: File, pages: usize) -> io::Result<Self> {
        // At least one part, so that an empty file can be mapped; the caller checks its length.
        let parts = pages.div_ceil(ENTRIES).max(1);
        let entries = Mapping::of_file(&file, 0, parts * PAGE_SIZE)?;
        let there = (0..parts).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { file, entries, there, states: States::new(pages)? })
    }

    /// Keeps the table from being swapped out.
    pub(crate) fn lock_in_ram(&self) -> io::Result<()> {
        self.entries.lock_in_ram()
    }

    /// Takes over the entries in the file; replaces each that is not a hole by the result of
    /// `keep`. Returns the number of stored pages.
    pub(crate) fn adopt(&mut self, mut keep: impl FnMut(usize, u32) -> u32) -> io::Result<usize> {
        let mut found = 0;
        for parts in mapping::stored_runs(&self.file, self.there.len())? {
            self.entries.populate_read(&parts)?;
            self.there[parts.clone()].iter().for_each(|there| there.store(true, Ordering::Relaxed));
            for page in parts.start * ENTRIES..(parts.end * ENTRIES).min(self.pages()) {
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
        // SAFETY: the mapping has at least `pages` entries, is page-aligned and only ever used
        // through this function; any bits are a valid entry.
        unsafe { slice::from_raw_parts(self.entries.base().cast(), self.pages()) }
    }

    fn entry(&self, page: usize) -> u32 {
        if self.stored(page) { self.entries()[page].load(Ordering::Relaxed) } else { HOLE }
    }
}

impl LeasePages for Table {
    fn states(&self) -> &States {
        &self.states
    }
}

/// Entries held for reading.
pub(crate) type TableRead<'a> = Held<'a, Table, READ>;
/// Entries held for writing.
pub(crate) type TableWrite<'a> = Held<'a, Table, WRITE>;

impl<const MODE: bool> Held<'_, Table, MODE> {
    /// Returns the frame of a held page, or [`HOLE`].
    pub(crate) fn entry(&self, page: usize) -> u32 {
        self.assert_held(&(page..page + 1));
        self.of.entry(page)
    }
}

impl TableWrite<'_> {
    /// Allocates room for the page's entry, so that [`set`](Self::set) cannot fail.
    pub(crate) fn make_room(&mut self, page: usize) -> io::Result<()> {
        let part = page / ENTRIES;
        let there = &self.of.there[part];
        if !there.load(Ordering::Relaxed) {
            self.of.entries.populate_write(&(part..part + 1))?;
            there.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sets the page's entry to `frame` or [`HOLE`]; the entry must have room.
    ///
    /// Release: a process that finds the entry after a crash also finds the frame's contents.
    pub(crate) fn set(&mut self, page: usize, frame: u32) {
        self.assert_held(&(page..page + 1));
        assert!(self.of.there[page / ENTRIES].load(Ordering::Relaxed), "room for the entry");
        self.of.entries()[page].store(frame, Ordering::Release);
        self.of.states.set_stored(&(page..page + 1), frame != HOLE);
    }
}
