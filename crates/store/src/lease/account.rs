//! The quota of a lease, and how much of it is in use.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_page::export::ExportError;
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};

/// The number of pages that a lease stores, and its limit. Each page counts in full, even if other
/// leases share its frame.
#[derive(Debug)]
pub(crate) struct Account {
    lease: LeaseId,
    quota_pages: u64,
    stored_pages: AtomicU64,
}

impl Account {
    pub(crate) fn new(lease: LeaseId, quota: Bytes, stored_pages: usize) -> Self {
        let quota_pages = quota.0 / PAGE_SIZE as u64;
        Self { lease, quota_pages, stored_pages: AtomicU64::new(stored_pages as u64) }
    }

    pub(crate) fn quota(&self) -> Bytes {
        Bytes(self.quota_pages * PAGE_SIZE as u64)
    }

    pub(crate) fn stored(&self) -> Bytes {
        Bytes(self.stored_pages.load(Ordering::Relaxed) * PAGE_SIZE as u64)
    }

    /// Reserves `pages` more, or fails with [`ExportError::Full`] and reserves none.
    pub(crate) fn reserve(&self, pages: usize) -> Result<(), ExportError> {
        let fits =
            |stored: u64| Some(stored + pages as u64).filter(|&after| after <= self.quota_pages);
        match self.stored_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(()),
            Err(_) => Err(ExportError::Full { lease: self.lease, quota: self.quota() }),
        }
    }

    pub(crate) fn give_back(&self, pages: usize) {
        self.stored_pages.fetch_sub(pages as u64, Ordering::Relaxed);
    }

    /// Returns the error for pages that the kernel has no room for.
    pub(crate) fn no_memory(&self, source: io::Error) -> ExportError {
        ExportError::NoMemory { lease: self.lease, source }
    }
}
