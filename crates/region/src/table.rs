//! The state of each page of a region: one byte a page, in a file that outlives the engine.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;

use aquifer_region_client::FileMap;

use crate::effect;

/// The place of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Place {
    /// Nowhere: it reads as zeroes, as it was never written or was discarded.
    Zero,
    /// In the volume only.
    Remote,
    /// In the file, and perhaps in a program's page table.
    Resident,
    /// In the file, and in no page table: each touch faults.
    Unmapped,
    /// On its way into the file or the page table.
    Filling,
    /// On its way out of the page table, to the volume, or out of the file.
    Leaving,
    /// Kept once for several regions of the group, and not in the file. The volume may have it,
    /// too.
    Shared,
    /// Nowhere, though it was not discarded. Programs that touch it wait.
    Lost,
}

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) place: Place,
    /// The volume has the page, perhaps an older version.
    pub(crate) stored: bool,
    /// The page is known to differ from the volume's, if the volume has it at all. A page in a
    /// program's page table may be dirty without this flag.
    pub(crate) dirty: bool,
    /// A thread waits for the page, and must be woken when the page has arrived at its place.
    pub(crate) wanted: bool,
    /// The page is still with the engine on the source host, and comes from there. The volume has
    /// an older version.
    pub(crate) awaiting_source: bool,
}

const STORED: u8 = 1 << 4;
const DIRTY: u8 = 1 << 5;
const WANTED: u8 = 1 << 6;
const AWAITING_SOURCE: u8 = 1 << 7;

impl Page {
    const fn new(place: Place) -> Self {
        Self { place, stored: false, dirty: false, wanted: false, awaiting_source: false }
    }

    fn from_byte(byte: u8) -> Self {
        let place = match byte & 0xf {
            1 => Place::Remote,
            2 => Place::Resident,
            3 => Place::Unmapped,
            4 => Place::Filling,
            5 => Place::Leaving,
            6 => Place::Shared,
            7 => Place::Lost,
            _ => Place::Zero,
        };
        let is = |flag| byte & flag != 0;
        Self {
            place,
            stored: is(STORED),
            dirty: is(DIRTY),
            wanted: is(WANTED),
            awaiting_source: is(AWAITING_SOURCE),
        }
    }

    fn byte(self) -> u8 {
        let flag = |is, flag| if is { flag } else { 0 };
        let flags = flag(self.stored, STORED) | flag(self.dirty, DIRTY) | flag(self.wanted, WANTED);
        self.place as u8 | flags | flag(self.awaiting_source, AWAITING_SOURCE)
    }

    pub(crate) fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// Returns whether the page is not on its way.
    pub(crate) fn is_in_place(self) -> bool {
        !matches!(self.place, Place::Filling | Place::Leaving)
    }

    /// Returns whether the page takes a frame of the local cache.
    pub(crate) fn has_frame(self) -> bool {
        !matches!(self.place, Place::Zero | Place::Remote | Place::Shared | Place::Lost)
    }

    /// Returns the state of the page after its removal from the file.
    pub(crate) fn without_frame(self) -> Self {
        let place = if self.stored { Place::Remote } else { Place::Zero };
        Self { stored: self.stored, awaiting_source: self.awaiting_source, ..Self::new(place) }
    }
}

/// The states of all pages of a region. Changes are made under the lock of the engine's cache.
#[derive(Debug)]
pub(crate) struct Table(FileMap);

impl Table {
    /// Maps the table of a region of so many pages; in a new file, all pages are [`Place::Zero`].
    pub(crate) fn new(file: &File, pages: u64) -> io::Result<Self> {
        FileMap::new(file, pages as usize).map(Self)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.0.bytes().len() as u64
    }

    /// Returns whether the table is as in a new file.
    pub(crate) fn is_new(&self) -> bool {
        self.0.bytes().iter().all(|byte| byte.load(Ordering::Relaxed) == 0)
    }

    pub(crate) fn get(&self, page: u64) -> Page {
        Page::from_byte(self.0.bytes()[page as usize].load(Ordering::Acquire))
    }

    pub(crate) fn set(&self, page: u64, is: Page) {
        effect::at("table");
        self.0.bytes()[page as usize].store(is.byte(), Ordering::Release);
    }
}
