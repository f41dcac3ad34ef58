//! Restoring a volume of an earlier process from its ledger.

use std::ops::Range;

use aquifer_page::{ExtentIndex, LeaseId};

use crate::error::VolumeError;
use crate::extent::Place;
use crate::volume::Volume;

impl Volume {
    /// Puts an extent back into the slot that the earlier process recorded in its ledger. `stored`
    /// are byte ranges in the extent with data in every page. `unsure` are ranges that may hold
    /// anything.
    ///
    /// The caller calls this after it added the leases and the spill file, and before any I/O.
    ///
    /// # Errors
    /// [`VolumeError::UnknownLease`] if the volume has no such lease or extent, or if the slot is
    /// not free.
    pub fn restore(
        &self,
        extent: ExtentIndex,
        (lease, slot): (LeaseId, u32),
        stored: impl IntoIterator<Item = Range<u64>>,
        unsure: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<(), VolumeError> {
        let unknown = || VolumeError::UnknownLease(self.id(), lease);
        let holder = self.leases.find_noted(lease);
        let slot = holder.and_then(|lease| lease.take_slot(slot)).ok_or_else(unknown)?;
        if slot.lease.target.is_none() {
            self.spills();
        }
        let extent = self.extents.get(extent.0 as usize).ok_or_else(unknown)?;
        for bytes in stored {
            extent.written.set(&bytes);
            extent.nonzero.set(&bytes);
        }
        unsure.into_iter().for_each(|bytes| extent.written.set(&bytes));
        *extent.alone() = Place::At(slot);
        Ok(())
    }

    /// Notes that another process has used the leases, so that unused slots may hold anything. The
    /// volume then discards them when it places extents there.
    pub fn distrust_unused(&self) {
        self.leases.list().iter().for_each(|lease| lease.distrust());
    }
}
