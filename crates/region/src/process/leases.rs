//! Requests that change a region's leases, and their record.

use std::path::{Path, PathBuf};

use aquifer_page::LeaseId;
use aquifer_transport::tls::Identity;
use aquifer_volume::{LeaseTarget, Progress, SecondCopy, SpillFile, VolumeError};

use super::control::Serving;
use super::files::RegionSpec;
use super::spill;
use crate::error::RegionError;
use crate::{handover, lock};

impl Serving {
    /// Adds a lease to the record, and then to the volume. `identity` is the directory of the
    /// host's certificate.
    pub(super) fn add_lease(
        &self,
        lease: LeaseTarget,
        identity: Option<PathBuf>,
    ) -> Result<(), RegionError> {
        let _changing = lock(&self.changing_leases);
        if let Some(directory) = identity.filter(|_| self.engine.volume().identity().is_none()) {
            let identity = Identity::load(&directory)?;
            self.note(|spec| {
                spec.identity = Some(directory);
                Ok(())
            })?;
            self.engine.volume().identify(identity);
        }
        self.engine.add_lease(lease, |lease| {
            self.note_leases(|leases| {
                leases.retain(|known| known.lease != lease.lease);
                leases.push(lease.clone());
            })
        })
    }

    /// Adds a second copy of a lease to the record, and then to the volume.
    pub(super) fn add_copy(&self, copy: SecondCopy) -> Result<(), RegionError> {
        let _changing = lock(&self.changing_leases);
        self.engine.add_copy(copy, |copy| {
            self.note(|spec| {
                spec.copies.retain(|known| known.of != copy.of);
                spec.copies.push(copy.clone());
                Ok(())
            })
            .map(drop)
        })
    }

    /// Ends the second copy on a lease, if one is there, and removes it from the record. Returns
    /// whether one was there.
    fn end_copy(&self, copy: LeaseId) -> Result<bool, RegionError> {
        let _changing = lock(&self.changing_leases);
        let is_known = lock(&self.spec).copies.iter().any(|known| known.lease.lease == copy);
        if !self.engine.end_copy(copy)? && !is_known {
            return Ok(false);
        }
        self.note(|spec| {
            spec.copies.retain(|known| known.lease.lease != copy);
            Ok(())
        })?;
        Ok(true)
    }

    /// Keeps second copies of all pages that leave, in files in this directory, unless the region
    /// keeps some.
    pub(super) fn keep_disk_copies(&self, directory: &Path) -> Result<(), RegionError> {
        let _changing = lock(&self.changing_leases);
        let (volume, known) = {
            let spec = lock(&self.spec);
            (spec.volume, spec.disk.clone())
        };
        let disk = match known {
            Some(known) => known,
            None => spill::disk_copies_in(directory, volume)?,
        };
        // The record names the files before they exist.
        self.note(|spec| {
            spec.disk = Some(disk.clone());
            Ok(())
        })?;
        self.engine.keep_disk_copies(&disk)
    }

    /// Makes a spill file in this directory, unless the region has one. The record names it before
    /// an extent can be in it.
    fn add_spill(&self, directory: &Path) -> Result<(), RegionError> {
        let _changing = lock(&self.changing_leases);
        if self.engine.volume().spilled().is_some() {
            return Ok(());
        }
        let volume = lock(&self.spec).volume;
        let spill = spill::make_in(directory, volume)?;
        let note = |spill: Option<SpillFile>| {
            self.note(|spec| {
                spec.spill = spill;
                Ok(())
            })
        };
        note(Some(spill.clone()))?;
        let added = self.engine.volume().add_spill(&spill);
        if added.is_err() {
            // The next engine need not try it.
            note(None)?;
        }
        Ok(added?)
    }

    /// Moves all extents off a lease, to the spill file if no lease takes them. The disk keeps some
    /// room for others.
    fn spill(
        &self,
        lease: LeaseId,
        directory: &Path,
        progress: impl FnMut(Progress),
    ) -> Result<(), RegionError> {
        spill::has_room(directory, self.engine.volume().held_by_lease(lease))?;
        self.add_spill(directory)?;
        self.engine.spill(lease, progress)
    }

    /// Moves all extents off a lease, and then removes it from the record. If there is no other
    /// room, they go to a spill file in the directory `spill`. A second copy on that lease ends.
    pub(super) fn evacuate(
        &self,
        lease: LeaseId,
        spill: Option<&Path>,
        mut progress: impl FnMut(Progress),
    ) -> Result<(), RegionError> {
        if self.end_copy(lease)? {
            return Ok(());
        }
        match (self.engine.evacuate(lease, &mut progress), spill) {
            // No room, or another lender that has some does not answer.
            (
                Err(RegionError::Pool(VolumeError::NoRoom(_) | VolumeError::Holder { .. }))
                | Err(RegionError::Refused(_)),
                Some(directory),
            ) => self.spill(lease, directory, progress)?,
            (evacuated, _) => evacuated?,
        }
        let _changing = lock(&self.changing_leases);
        // Another request may have added it again meanwhile.
        if self.engine.volume().targets().iter().any(|target| target.lease == lease) {
            return Ok(());
        }
        self.note(|spec| {
            spec.leases.retain(|target| target.lease != lease);
            spec.copies.retain(|copy| copy.of != lease);
            // The next engine must not take it for a region for experiments, without lenders.
            spec.began_local |= spec.leases.is_empty();
            Ok(())
        })
        .map(drop)
    }

    /// Records the leases that the source host has, before the volume here has them.
    pub(super) fn note_sent_leases(&self, sent: &[u8]) -> Result<(), RegionError> {
        if !self.files.is_foreign() {
            return Ok(());
        }
        let leases = handover::leases_here(&lock(&self.spec).leases, sent)?;
        self.note_leases(|known| *known = leases)
    }

    /// Records the incarnations that the region's first engine found. The next engines know by them
    /// a lender that has lost the pages.
    pub(super) fn note_incarnations(&self) -> Result<(), RegionError> {
        let volume = self.engine.volume();
        let (found, copies) = (volume.targets(), volume.copies());
        let is_known = {
            let spec = lock(&self.spec);
            // A copy that this engine cannot use stays in the record.
            spec.leases == found && copies.iter().all(|copy| spec.copies.contains(copy))
        };
        if is_known {
            return Ok(());
        }
        self.note(|spec| {
            spec.leases = found;
            for copy in copies {
                spec.copies.retain(|known| known.of != copy.of);
                spec.copies.push(copy);
            }
            Ok(())
        })
        .map(drop)
    }

    fn note_leases(&self, change: impl FnOnce(&mut Vec<LeaseTarget>)) -> Result<(), RegionError> {
        let change = |spec: &mut RegionSpec| {
            change(&mut spec.leases);
            Ok(())
        };
        self.note(change).map(drop)
    }
}
