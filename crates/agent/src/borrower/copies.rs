//! Second copies of the pages in borrowed leases, for swap and for regions.

use aquifer_blockdev::process::client;
use aquifer_control::BorrowedLease;
use aquifer_page::{LeaseId, VolumeId};

use super::Borrower;

impl Borrower {
    /// Returns whether the leases of a volume for swap can have second copies. A process of an
    /// earlier version can begin none, and nor can the kernel.
    pub fn takes_copies(&self, volume: VolumeId) -> bool {
        self.volumes().get(&volume).is_some_and(|record| record.copies.is_some())
    }

    /// Begins a second copy of the lease `of` on the lease `onto`.
    ///
    /// # Errors
    /// Says why that lease does not hold one.
    pub fn add_copy(
        &self,
        volume: VolumeId,
        of: LeaseId,
        onto: &BorrowedLease,
    ) -> Result<(), String> {
        let added = match self.regions.has(volume) {
            true => self.copy_region(volume, of, onto),
            false => self.copy_swap(volume, of, onto),
        };
        if added.is_err() {
            self.reach.forget([onto.lease]);
        }
        added
    }

    fn copy_swap(&self, volume: VolumeId, of: LeaseId, onto: &BorrowedLease) -> Result<(), String> {
        let (state, lease) = (&self.config.state, onto.lease);
        let target = self.reach.target(onto)?;
        let added = client::add_copy(state, volume, of, target).map_err(|error| error.to_string());
        self.refresh(volume);
        // The process may have begun it without an answer.
        if added.is_err() && self.stands_on(volume, lease) == Some(true) {
            let left = client::evacuate(state, volume, (lease, false), |_| ());
            self.refresh(volume);
            if let Err(error) = left
                && self.stands_on(volume, lease) == Some(true)
            {
                tracing::warn!(%volume, %lease, "the volume keeps a copy: {error}");
                return Ok(());
            }
        }
        added
    }
}
