//! A volume that another process has left, taken up from its ledger.

use std::ops::Range;

use aquifer_page::LeaseId;

use crate::error::PoolError;
use crate::extent::Place;
use crate::volume::Volume;

impl Volume {
    /// Puts an extent back where the ledger of the process before had it. `stored` are the bytes within it whose pages hold
    /// something else than zeroes, `unsure` those that may hold anything.
    ///
    /// To be called after the leases were added, before anything else.
    ///
    /// # Errors
    /// [`PoolError::UnknownLease`] if the lease is not the volume's, or the slot is not free.
    pub fn restore(
        &self,
        extent: usize,
        (lease, slot): (LeaseId, u32),
        stored: impl IntoIterator<Item = Range<u64>>,
        unsure: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<(), PoolError> {
        let unknown = || PoolError::UnknownLease(self.id(), lease);
        let slot =
            self.leases.find(lease).and_then(|lease| lease.take_slot(slot)).ok_or_else(unknown)?;
        let extent = self.extents.get(extent).ok_or_else(unknown)?;
        for bytes in stored {
            extent.written.set(&bytes);
            extent.nonzero.set(&bytes);
        }
        unsure.into_iter().for_each(|bytes| extent.written.set(&bytes));
        *extent.alone() = Place::At(slot);
        Ok(())
    }
}
