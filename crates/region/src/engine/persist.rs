//! Having lenders have all that is here.

use std::collections::HashSet;

use super::Engine;
use super::evict::BATCH;
use crate::error::RegionError;
use crate::lock;
use crate::table::{Page, Place};

impl Engine {
    /// Writes what was written before this call and is only here to the volume. Programs go on meanwhile, and all stays in the cache.
    ///
    /// # Errors
    /// When pages cannot be written; they stay, and are still dirty.
    pub fn persist(&self) -> Result<(), RegionError> {
        let mut next = 0;
        while next < self.table.pages() {
            let (pages, mapped) = self.take_present(&mut next);
            if pages.is_empty() {
                self.wait_for_change(lock(&self.cache));
                continue;
            }
            let failed = match self.find_dirty(&mapped) {
                Ok(()) => {
                    let (written, failed) = self.write_back(self.control_worker(), &pages);
                    self.note_written(&written);
                    failed
                }
                Err(error) => Some(error),
            };
            self.stay(&pages);
            if let Some(error) = failed {
                return Err(error);
            }
        }
        self.volume.flush(self.control_worker())?;
        Ok(())
    }

    /// Some pages from `next` on that are in the file, as leaving, and those of them that programs may have mapped. None where one is
    /// under way; then `next` is that.
    fn take_present(&self, next: &mut u64) -> (Vec<u64>, Vec<u64>) {
        let (mut pages, mut mapped) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let mut cache = lock(&self.cache);
        while *next < self.table.pages() && pages.len() < BATCH {
            let is = self.table.get(*next);
            match is.place {
                Place::Zero | Place::Remote => {}
                Place::Filling | Place::Leaving => break,
                Place::Resident | Place::Unmapped => {
                    if is.place == Place::Resident {
                        cache.policy.went(*next);
                        mapped.push(*next);
                    }
                    self.table.set(*next, is.at(Place::Leaving));
                    pages.push(*next);
                }
            }
            *next += 1;
        }
        (pages, mapped)
    }

    /// Takes the pages out of all page tables, and notes which of them are dirty.
    fn find_dirty(&self, pages: &[u64]) -> Result<(), RegionError> {
        let clean = self.unmap(pages).map_err(RegionError::io("cannot take pages out of a program"));
        let _cache = lock(&self.cache);
        let none = HashSet::new();
        let unwritten = clean.as_ref().unwrap_or(&none);
        for page in pages {
            let is = self.table.get(*page);
            self.table.set(*page, Page { dirty: is.dirty || !unwritten.contains(page), ..is });
        }
        clean.map(|_| ())
    }
}
