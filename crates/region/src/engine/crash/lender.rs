//! A simulated lender that outlives every engine of a schedule.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_page::{LeaseId, PAGE_SIZE, WorkerId};
use aquifer_volume::holder::{Holder, HolderError};

use crate::{effect, lock};

const PAGE: u64 = PAGE_SIZE as u64;

/// The pages of all leases, and the one host that may change them.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// The pages, by lease and number.
    pages: Mutex<BTreeMap<(LeaseId, u64), Box<[u8]>>>,
    owner: AtomicU64,
    trespassed: AtomicBool,
}

impl Pages {
    /// Makes this host the owner of the region.
    pub(super) fn give_to(&self, host: u64) {
        self.owner.store(host, Ordering::Relaxed);
    }

    /// Returns whether a host other than the owner changed a page.
    pub(super) fn was_trespassed(&self) -> bool {
        self.trespassed.load(Ordering::Relaxed)
    }

    /// Returns the number of pages on a lease.
    pub(super) fn count(&self, lease: LeaseId) -> usize {
        lock(&self.pages).range((lease, 0)..=(lease, u64::MAX)).count()
    }
}

/// A lease as one host reaches it.
#[derive(Debug)]
pub(super) struct CrashLender {
    pub(super) host: u64,
    pub(super) lease: LeaseId,
    pub(super) pages: Arc<Pages>,
}

impl CrashLender {
    fn change(&self) {
        if self.pages.owner.load(Ordering::Relaxed) != self.host {
            self.pages.trespassed.store(true, Ordering::Relaxed);
        }
    }
}

impl Holder for CrashLender {
    fn read(&self, _worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        let pages = lock(&self.pages.pages);
        for (at, into) in into.chunks_exact_mut(PAGE_SIZE).enumerate() {
            match pages.get(&(self.lease, offset / PAGE + at as u64)) {
                Some(page) => into.copy_from_slice(page),
                None => into.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, _worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        for (at, data) in data.chunks_exact(PAGE_SIZE).enumerate() {
            effect::at("lender writes");
            self.change();
            let page = (self.lease, offset / PAGE + at as u64);
            lock(&self.pages.pages).insert(page, data.into());
        }
        Ok(())
    }

    fn discard(&self, _worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        let range = (self.lease, offset / PAGE)..(self.lease, (offset + length) / PAGE);
        let some: Vec<_> = lock(&self.pages.pages).range(range).map(|(page, _)| *page).collect();
        for page in some {
            effect::at("lender discards");
            self.change();
            lock(&self.pages.pages).remove(&page);
        }
        Ok(())
    }

    fn flush(&self, _worker: WorkerId) -> Result<(), HolderError> {
        Ok(())
    }
}
