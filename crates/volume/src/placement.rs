//! The placement of extents: worst-fit, on the lease with the most room.

use std::cmp::Reverse;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use aquifer_page::{LeaseId, WorkerId};

use crate::holder::HolderError;
use crate::lease::{Lease, Slot};

/// The leases of a volume, and its spill file.
#[derive(Debug)]
pub(crate) struct Leases {
    list: RwLock<Vec<Arc<Lease>>>,
    spill: OnceLock<Arc<Lease>>,
}

impl Leases {
    pub(crate) fn new() -> Self {
        Self { list: RwLock::new(Vec::new()), spill: OnceLock::new() }
    }

    /// Adds a spill file, unless there is one.
    pub(crate) fn set_spill(&self, spill: Lease) {
        let _ = self.spill.set(Arc::new(spill));
    }

    pub(crate) fn spill(&self) -> Option<&Arc<Lease>> {
        self.spill.get()
    }

    pub(crate) fn list(&self) -> RwLockReadGuard<'_, Vec<Arc<Lease>>> {
        self.list.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn list_mut(&self) -> RwLockWriteGuard<'_, Vec<Arc<Lease>>> {
        self.list.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, id: LeaseId) -> Option<Arc<Lease>> {
        self.list().iter().find(|lease| lease_id(lease) == Some(id)).cloned()
    }

    /// Finds the lease, or the spill file, of a ledger's entry.
    pub(crate) fn find_noted(&self, id: LeaseId) -> Option<Arc<Lease>> {
        let list = self.list();
        let mut all = list.iter().chain(self.spill());
        all.find(|lease| lease.noted_as == Some(id)).cloned()
    }

    /// Takes a slot on the best lease outside `tried`, and adds leases that do not work to `tried`.
    /// Returns `None` if no lease is left. The error is that of the last lease that did not work in
    /// this call.
    ///
    /// The best is the healthy lease with the most free slots. Then comes the spill file, then a
    /// lease that seems unreachable or full, because it may have recovered. A lost lease takes no
    /// new extents.
    pub(crate) fn take(
        &self,
        worker: WorkerId,
        tried: &mut Vec<Arc<Lease>>,
    ) -> Result<Option<Slot>, (Arc<Lease>, HolderError)> {
        let mut last = None;
        while let Some(lease) = self.best(tried) {
            match lease.take(worker) {
                Ok(Some(slot)) => return Ok(Some(slot)),
                // Other threads took its last slots.
                Ok(None) => {}
                Err(error) => last = Some((lease.clone(), error)),
            }
            tried.push(lease);
        }
        last.map_or(Ok(None), Err)
    }

    fn best(&self, tried: &[Arc<Lease>]) -> Option<Arc<Lease>> {
        let list = self.list();
        let candidates = || {
            let all = list.iter().chain(self.spill());
            let all = all.filter(|lease| !lease.is_lost() && lease.free() > 0);
            all.filter(|lease| !tried.iter().any(|other| Arc::ptr_eq(lease, other)))
        };
        let rank = |lease: &&Arc<Lease>| {
            let is_safe = lease.holder.all_answer();
            (
                lease.is_healthy(),
                is_safe,
                lease.target.is_some(),
                lease.free(),
                Reverse(lease_id(lease)),
            )
        };
        candidates().max_by_key(rank).cloned()
    }
}

pub(crate) fn lease_id(lease: &Lease) -> Option<LeaseId> {
    lease.target.as_ref().map(|target| target.lease)
}
