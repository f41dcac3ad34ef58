//! The scanner's view of a region, by the files that it shares with the engine. The engine is not
//! asked.

use std::cell::Cell;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use aquifer_page::{FrameIndex, PAGE_SIZE, PageIndex};

use super::files::Files;
use crate::error::RegionError;
use crate::file::RegionFile;
use crate::frames::Sharers;
use crate::table::{Place, Table};

/// The pages of a region that are here. An open view keeps the region's memory allocated after its
/// removal.
#[derive(Debug)]
pub struct View {
    file: RegionFile,
    table: Table,
    sharers: Sharers,
    /// The file that says that the region is watched.
    record: PathBuf,
    /// Whether it was watched at the last look. If not, only its file says which pages are here.
    is_watched: bool,
    /// Pages that were not in the file since the last look: the first, and the end.
    hole: Cell<(u64, u64)>,
}

impl View {
    /// Opens the view of a region.
    ///
    /// # Errors
    /// One of its files cannot be used.
    pub fn open(files: &Files) -> Result<Self, RegionError> {
        let pages = files.read()?.size.pages();
        let fail =
            |path: &std::path::Path| RegionError::io(format!("cannot map {}", path.display()));
        let [region, table, sharers] = [files.region(), files.table(), files.sharers()];
        Ok(Self {
            file: RegionFile::new(Files::open(&region)?).map_err(fail(&region))?,
            table: Table::new(&Files::open(&table)?, pages).map_err(fail(&table))?,
            sharers: Sharers::of_another(&Files::open_or_make(&sharers)?, pages)
                .map_err(fail(&sharers))?,
            is_watched: files.watched().exists(),
            record: files.watched(),
            hole: Cell::default(),
        })
    }

    /// Returns whether the view is of the present region, and not of a removed one of the same
    /// name.
    pub fn is_of(&self, files: &Files) -> bool {
        let numbers = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let now = std::fs::metadata(files.region()).map(numbers);
        matches!((now, self.file.file().metadata().map(numbers)), (Ok(now), Ok(own)) if now == own)
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u64 {
        self.table.pages()
    }

    /// Finds out whether an engine watches the region by now. The caller calls this about once a
    /// second.
    pub fn look(&mut self) {
        self.is_watched = self.record.exists();
        self.hole.take();
    }

    /// Returns whether a page is in the local cache and not shared.
    pub fn is_here(&self, page: PageIndex) -> bool {
        match self.table.get(page.0).place {
            Place::Resident | Place::Unmapped => true,
            Place::Zero => !self.is_watched && self.is_in_file(page.0),
            _ => false,
        }
    }

    fn is_in_file(&self, page: u64) -> bool {
        let (start, end) = self.hole.get();
        if (start..end).contains(&page) {
            return false;
        }
        let next = self.file.next(page);
        if next > page {
            self.hole.set((page, next));
        }
        next == page
    }

    /// Returns whether a page is a frame of the group.
    pub fn is_shared(&self, page: PageIndex) -> bool {
        self.table.get(page.0).place == Place::Shared
    }

    /// Reads pages. A write meanwhile is included wholly, partly or not at all. Absent pages read
    /// as zeroes.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&self, first: PageIndex, into: &mut [u8]) -> Result<(), RegionError> {
        debug_assert!(into.len().is_multiple_of(PAGE_SIZE));
        self.file.read(first.0, into).map_err(RegionError::io("cannot read a region"))
    }

    /// Returns the pages that are frames of the group, or are about to be, each with its frame.
    pub fn shared(&self) -> impl Iterator<Item = (PageIndex, FrameIndex)> {
        self.sharers.all()
    }
}
