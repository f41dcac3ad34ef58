//! Restoring a volume of an earlier process from its ledger.

use std::ops::Range;

use aquifer_page::{ExtentIndex, LeaseId, PAGES_PER_EXTENT};

use crate::error::VolumeError;
use crate::extent::Place;
use crate::lease::Slot;
use crate::volume::Volume;

impl Volume {
    /// Puts an extent back into the slot that the earlier process recorded in its ledger. `held`
    /// are the byte ranges in the extent that the slot may hold data of.
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
        held: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<(), VolumeError> {
        let unknown = || VolumeError::UnknownLease(self.id(), lease);
        let holder = self.leases.find_noted(lease);
        let slot = holder.and_then(|lease| lease.take_slot(slot)).ok_or_else(unknown)?;
        if slot.lease.target.is_none() {
            self.spills();
        }
        let extent = self.extents.get(extent.0 as usize).ok_or_else(unknown)?;
        held.into_iter().for_each(|bytes| extent.written.set(&bytes));
        *extent.alone() = Place::At(slot);
        Ok(())
    }

    /// Returns the tags of the extent's pages, for a volume of another host; none if the extent has
    /// no place. No extent may move meanwhile.
    pub fn tags(&self, extent: ExtentIndex) -> Vec<u64> {
        let extent = self.extents.get(extent.0 as usize);
        extent.and_then(|extent| extent.shared().slot().map(Slot::tags)).unwrap_or_default()
    }

    /// Sets the tags of the extent's first pages to those of the volume on another host, after
    /// [`restore`](Self::restore) and before any I/O.
    ///
    /// # Panics
    /// There are more tags than an extent has pages.
    pub fn restore_tags(&self, extent: ExtentIndex, tags: &[u64]) {
        assert!(tags.len() as u64 <= PAGES_PER_EXTENT, "tags of one extent");
        let extent = self.extents.get(extent.0 as usize);
        extent.into_iter().for_each(|extent| {
            extent.shared().slot().into_iter().for_each(|slot| slot.put_tags(tags));
        });
    }

    /// Notes that another process has used the leases, so that unused slots may hold anything. The
    /// volume then discards them when it places extents there.
    pub fn distrust_unused(&self) {
        self.leases.list().iter().for_each(|lease| lease.distrust());
    }
}
