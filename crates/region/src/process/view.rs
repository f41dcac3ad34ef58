//! A region as who looks for equal pages sees it: by the files that it shares with its engine, which is not asked.

use std::os::unix::fs::MetadataExt as _;

use aquifer_page::PAGE_SIZE;

use super::files::Files;
use crate::error::RegionError;
use crate::file::RegionFile;
use crate::frames::Sharers;
use crate::table::{Place, Table};

/// The pages of a region that are here. (What holds one keeps the region's memory from being given back when it is removed.)
#[derive(Debug)]
pub struct View {
    file: RegionFile,
    table: Table,
    sharers: Sharers,
}

impl View {
    /// Of a region that is there.
    ///
    /// # Errors
    /// Where one of its files cannot be used.
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
        })
    }

    /// Whether it is of the region that is there now, and not of one of the same name that is gone.
    pub fn is_of(&self, files: &Files) -> bool {
        let numbers = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let now = std::fs::metadata(files.region()).map(numbers);
        matches!((now, self.file.file().metadata().map(numbers)), (Ok(now), Ok(own)) if now == own)
    }

    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.table.pages()
    }

    /// Whether a page is in its local cache and not shared.
    pub fn is_here(&self, page: u64) -> bool {
        matches!(self.table.get(page).place, Place::Resident | Place::Unmapped)
    }

    /// Whether a page is a frame of the group.
    pub fn is_shared(&self, page: u64) -> bool {
        self.table.get(page).place == Place::Shared
    }

    /// Reads pages as they are; what is written meanwhile is there, or is not, or in part; what is not here is zeroes.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&self, first: u64, into: &mut [u8]) -> Result<(), RegionError> {
        debug_assert!(into.len().is_multiple_of(PAGE_SIZE));
        self.file.read(first, into).map_err(RegionError::io("cannot read a region"))
    }

    /// The pages that are frames of the group, or are about to be, each with its frame.
    pub fn shared(&self) -> impl Iterator<Item = (u64, u64)> {
        self.sharers.all()
    }
}
