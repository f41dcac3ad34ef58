//! What is known of each page of a region: a byte a page, in a file that outlives the engine.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;

use aquifer_mapping::FileMap;

use crate::effect;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Place {
    /// Nowhere: it reads as zeroes, and was never written or has been discarded.
    Zero,
    /// In the volume only.
    Remote,
    /// In the file, and the program may have it in its page table.
    Resident,
    /// In the file, and in no page table: whoever touches it says so by a fault.
    Unmapped,
    /// Being put into the file or the page table.
    Filling,
    /// Being taken out of the page table, written to the volume, or taken out of the file.
    Leaving,
    /// Kept once for several regions of the group, and in the file no more; the volume may have it, too.
    Shared,
    /// Nowhere any more, though it was not discarded. It is not shown as anything.
    Lost,
}

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) place: Place,
    /// The volume has it, as it is or as it once was.
    pub(crate) stored: bool,
    /// It is known to differ from what the volume has, if that has it at all. (A page that is in the program's page table may have been
    /// written to without this.)
    pub(crate) dirty: bool,
    /// Somebody waits for it who must be woken when it has arrived at its place.
    pub(crate) wanted: bool,
    /// What it is is with the engine before this one, on another host, and comes from there: what the volume has is old.
    pub(crate) coming: bool,
}

const STORED: u8 = 1 << 4;
const DIRTY: u8 = 1 << 5;
const WANTED: u8 = 1 << 6;
const COMING: u8 = 1 << 7;

impl Page {
    const fn new(place: Place) -> Self {
        Self { place, stored: false, dirty: false, wanted: false, coming: false }
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
        Self { place, stored: is(STORED), dirty: is(DIRTY), wanted: is(WANTED), coming: is(COMING) }
    }

    fn byte(self) -> u8 {
        let flag = |is, flag| if is { flag } else { 0 };
        let flags = flag(self.stored, STORED) | flag(self.dirty, DIRTY) | flag(self.wanted, WANTED);
        self.place as u8 | flags | flag(self.coming, COMING)
    }

    pub(crate) fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// Whether it is not on its way.
    pub(crate) fn is_settled(self) -> bool {
        !matches!(self.place, Place::Filling | Place::Leaving)
    }

    /// Whether a frame of the local cache is taken by it.
    pub(crate) fn has_frame(self) -> bool {
        !matches!(self.place, Place::Zero | Place::Remote | Place::Shared | Place::Lost)
    }

    /// Where it is once it is not in the file.
    pub(crate) fn without_frame(self) -> Self {
        let place = if self.stored { Place::Remote } else { Place::Zero };
        Self { stored: self.stored, coming: self.coming, ..Self::new(place) }
    }
}

/// All pages of a region. Changes are made under the lock of the engine's cache.
#[derive(Debug)]
pub(crate) struct Table(FileMap);

impl Table {
    /// That of a region of so many pages; a new file says that all are zero.
    pub(crate) fn new(file: &File, pages: u64) -> io::Result<Self> {
        FileMap::new(file, pages as usize).map(Self)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.0.bytes().len() as u64
    }

    /// Whether nothing was ever noted there.
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
