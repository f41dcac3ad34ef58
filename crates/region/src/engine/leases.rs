//! Changes of the leases under a region, while its programs run.

use std::sync::atomic::Ordering;

use aquifer_page::LeaseId;
use aquifer_volume::{DiskCopies, LeaseTarget, Progress, SecondCopy, VolumeError};

use super::Engine;
use crate::error::RegionError;
use crate::handover;

impl Engine {
    /// Adds a lease. Calls `record` once the lease is known to be usable, and before an extent can
    /// be placed there: the next engine must find the lease in the record. A lease that the region
    /// has is not added again.
    ///
    /// # Errors
    /// The lease cannot be used or is being evacuated, another lease is at the same place, the
    /// region is being handed over, or `record` fails.
    pub fn add_lease(
        &self,
        lease: LeaseTarget,
        record: impl FnOnce(&LeaseTarget) -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        self.may_change()?;
        let volume = &self.lenders.volume;
        let known = volume.targets();
        if known.iter().any(|known| known.is_same_lease(&lease))
            && volume.evacuating(lease.lease).is_none()
        {
            return Ok(());
        }
        let is_in_the_way =
            |known: &&LeaseTarget| known.lease != lease.lease && known.is_same_place(&lease);
        if let Some(other) = known.iter().find(is_in_the_way) {
            return Err(RegionError::Misuse(format!(
                "lease {} is at {}, and so is lease {} of the region: the two would overwrite \
                 each other's pages; use another export",
                lease.lease,
                lease.uri(),
                other.lease
            )));
        }
        volume.add_recorded_lease(lease, record)?;
        // A hand-over that began meanwhile may or may not have told the other host of the lease.
        self.may_change()
    }

    /// Begins a second copy of a lease, on another lease. Calls `record` once that lease is known
    /// to be usable, and before a page can be there. A copy that the region has is not begun again.
    ///
    /// # Errors
    /// The lease cannot be used, the first lease is unknown or has another copy, the region is
    /// being handed over, or `record` fails.
    pub fn add_copy(
        &self,
        copy: SecondCopy,
        record: impl FnOnce(&SecondCopy) -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        self.may_change()?;
        let volume = &self.lenders.volume;
        let is_it = |known: &SecondCopy| {
            let (known_lease, lease) = (&known.lease, &copy.lease);
            known.of == copy.of
                && known_lease.lease == lease.lease
                && known_lease.is_same_place(lease)
        };
        if volume.copies().iter().any(is_it) {
            return Ok(());
        }
        volume.add_copy(copy, record)?;
        self.may_change()
    }

    /// Keeps second copies of all pages that leave, on this host's disk.
    ///
    /// # Errors
    /// The region is being handed over, or the copies cannot be begun.
    pub fn keep_disk_copies(&self, disk: &DiskCopies) -> Result<(), RegionError> {
        self.may_change()?;
        Ok(self.lenders.volume.keep_disk_copies(disk, false)?)
    }

    /// Ends the second copy on a lease, which may go back then. Returns false if no lease has it.
    ///
    /// # Errors
    /// Some page is only there, or the region is being handed over.
    pub fn end_copy(&self, copy: LeaseId) -> Result<bool, RegionError> {
        self.may_change()?;
        let volume = &self.lenders.volume;
        if !volume.copies().iter().any(|known| known.lease.lease == copy) {
            return Ok(false);
        }
        volume.end_copy(copy)?;
        Ok(true)
    }

    /// Moves all extents off a lease and releases it, while faults and evictions go on. If no other
    /// lease has room, its pages come home. Any caller may repeat this at any time. A lease that
    /// the region does not have counts as evacuated.
    ///
    /// # Errors
    /// The lender fails, the cache is too small without the lease, or the region is being handed
    /// over. Moved extents and pages stay moved, the others stay, and the lease is in use again.
    pub fn evacuate(
        &self,
        lease: LeaseId,
        mut progress: impl FnMut(Progress),
    ) -> Result<(), RegionError> {
        self.may_change()?;
        let volume = &self.lenders.volume;
        if !self.hold_room(lease) {
            volume.relieve(lease, &mut progress)?;
            return Err(VolumeError::NoRoom(volume.id()).into());
        }
        let left = match volume.release_to_lenders(lease, &mut progress) {
            Err(VolumeError::NoRoom(_)) => self.bring_home(lease, &mut progress),
            done => done.map_err(RegionError::from),
        };
        self.need_no_room(lease);
        left?;
        // A hand-over that began meanwhile may have told the other host that the region has it.
        self.may_change()
    }

    /// Moves all extents off a lease and releases it, as [`evacuate`](Self::evacuate), but to the
    /// spill file if no other lease has room.
    ///
    /// # Errors
    /// A lender or the spill file fails, or the region is being handed over.
    pub fn spill(&self, lease: LeaseId, progress: impl FnMut(Progress)) -> Result<(), RegionError> {
        self.may_change()?;
        self.lenders.volume.release(lease, progress)?;
        self.may_change()
    }

    /// Makes the leases of this host's volume those that the source host sent.
    ///
    /// # Errors
    /// A new lease cannot be used from here. Or a lease that the source has no more holds extents
    /// here: an earlier hand-over told their places before it failed.
    pub(super) fn take_leases(&self, sent: &[u8]) -> Result<(), RegionError> {
        let volume = &self.lenders.volume;
        let before = volume.targets();
        let leases = handover::leases_here(&before, sent)?;
        // First, as a lease that left may have come back with another key.
        let is_gone = |lease: &&LeaseTarget| !leases.contains(lease);
        for lease in before.iter().filter(is_gone) {
            volume.remove_unused(lease.lease)?;
        }
        for lease in leases.iter().filter(|lease| !before.contains(lease)) {
            volume.add_lease(lease.clone())?;
        }
        volume.distrust_unused();
        Ok(())
    }

    /// Sets whether pages and extents stay where they are, as during a hand-over.
    pub(super) fn freeze(&self, frozen: bool) {
        let cache = crate::lock(&self.cache);
        self.phase.frozen.store(frozen, Ordering::Relaxed);
        drop(cache);
        if frozen {
            self.lenders.volume.hold_still();
        } else {
            self.lenders.volume.let_move();
        }
    }
}
