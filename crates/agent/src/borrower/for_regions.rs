//! The borrower's orders about regions: leases for those that exist and those in the making.

use std::path::{self, Path, PathBuf};

use aquifer_api::{Problem, order};
use aquifer_control::{BorrowedLease, LiveVolume, VolumeStatus};
use aquifer_group::Agreements;
use aquifer_page::{LeaseId, RegionName, VolumeId};
use aquifer_region::process::RegionSpec;
use aquifer_volume::{LeaseTarget, SecondCopy};

use super::Borrower;
use crate::config::Protection;

impl Borrower {
    /// Adds the first leases to a region that exists.
    pub(super) fn supply(&self, live: &LiveVolume, region: &RegionName) -> Result<(), String> {
        let targets = live.leases.iter().map(|lease| self.target_for(live, lease));
        self.regions.supply(region, live.volume, targets.collect::<Result<_, _>>()?)
    }

    /// Adds more leases to a region. Returns those that could not be added.
    pub fn extend(&self, live: &LiveVolume) -> Vec<LeaseId> {
        let targets = live.leases.iter().map(|lease| (lease.lease, self.target_for(live, lease)));
        let unused = self.regions.extend(live.volume, targets.collect());
        self.reach.forget(unused.iter().copied());
        unused
    }

    /// Begins a second copy of the lease `of` of a region on the lease `onto`.
    pub(super) fn copy_region(
        &self,
        volume: VolumeId,
        of: LeaseId,
        onto: &BorrowedLease,
    ) -> Result<(), String> {
        let live = self.regions.live().into_iter().find(|live| live.volume == volume);
        let live = live.ok_or_else(|| "the region is gone".to_owned())?;
        // A copy that no lender must keep need not slow writes down either.
        let lags = live.owner.region().is_some_and(|region| {
            self.config.borrow.protection_of(region, &live.group) == Protection::Opportunistic
        });
        let lease = self.target_for(&live, onto)?;
        self.regions.add_copy(volume, SecondCopy { of, lease, lags })
    }

    /// Returns whether regions are to keep copies of their pages on this host's disk, and one does
    /// not.
    pub fn lacks_disk_copies(&self) -> bool {
        self.regions.lacks_disk_copies(|spec| self.wants_disk_copies(spec))
    }

    /// Orders these regions to keep copies of their pages on this host's disk.
    pub fn keep_disk_copies(&self) {
        let directory = self.spill_directory();
        self.regions.keep_disk_copies(&directory, |spec| self.wants_disk_copies(spec));
    }

    fn wants_disk_copies(&self, spec: &RegionSpec) -> bool {
        self.config.borrow.protection_of(&spec.name, &spec.group) == Protection::Disk
    }

    /// Returns the directory for files with pages. Engines have another working directory.
    fn spill_directory(&self) -> PathBuf {
        let directory = &self.config.borrow.spill;
        path::absolute(directory).unwrap_or_else(|_| directory.clone())
    }

    pub(super) fn evacuate_region(
        &self,
        volume: VolumeId,
        (lease, spills): (LeaseId, bool),
        onto: &[BorrowedLease],
    ) -> (Vec<LeaseId>, Result<(), String>) {
        let live = self.regions.live().into_iter().find(|live| live.volume == volume);
        let target = |lease: &BorrowedLease| {
            let live = live.as_ref().ok_or_else(|| "the region is gone".to_owned())?;
            self.target_for(live, lease)
        };
        let targets = onto.iter().map(|lease| (lease.lease, target(lease))).collect();
        let directory = self.spill_directory();
        let spill = spills.then_some(&*directory);
        let (unused, moved) = self.regions.evacuate(volume, (lease, spill), targets);
        self.reach.forget(unused.iter().copied().chain(moved.is_ok().then_some(lease)));
        (unused, moved)
    }

    /// Describes a lease to the region of a volume. A group's agreement says how to encrypt.
    fn target_for(&self, live: &LiveVolume, lease: &BorrowedLease) -> Result<LeaseTarget, String> {
        let mut target = self.reach.target(lease)?;
        let agreements = Agreements::of(&self.config.groups.agreements);
        if let Some(agreement) = agreements.find(&live.group).map_err(|error| error.to_string())? {
            target.encryption = agreement.lease_encryption();
        }
        if let (Some(region), Some(claim)) = (live.owner.region(), &mut target.claim) {
            claim.name = format!("region '{region}' of host {}", self.config.host);
            // Also while no process serves the region.
            claim.keeps = true;
        }
        Ok(target)
    }

    /// Begins to hand a region's leases over.
    pub fn expect(&self, live: &LiveVolume) {
        if let Some(region) = live.owner.region() {
            self.regions.expect(region, live.volume);
        }
    }

    /// Ends the hand-over to a region: its maker cannot get the leases.
    pub fn refuse(&self, live: &LiveVolume) {
        self.regions.refuse(live.volume);
    }

    /// Describes the leases for a region to its maker.
    ///
    /// # Errors
    /// Says which lease cannot be used.
    pub fn provide(&self, live: &LiveVolume) -> Result<order::Provided, Problem> {
        let targets: Result<Vec<_>, _> =
            live.leases.iter().map(|lease| self.target_for(live, lease)).collect();
        let leases = targets
            .and_then(|targets| serde_json::to_value(targets).map_err(|error| error.to_string()));
        leases
            .map(|leases| order::Provided { leases, identity: self.config.tls.clone() })
            .map_err(|error| Problem { error, help: None })
    }

    /// Ends the hand-over to a region, which exists or will not. Returns whether this host still
    /// held the leases for it.
    ///
    /// # Errors
    /// Says why this host does not find the region.
    pub fn settle(&self, live: &VolumeStatus, exists: bool) -> Result<bool, String> {
        match live.owner.region() {
            Some(region) => self.regions.settle(region, live.volume, exists),
            None => Ok(false),
        }
    }

    /// Returns the directory of the regions that this agent looks at.
    pub fn regions_directory(&self) -> &Path {
        self.regions.directory()
    }

    /// Returns the volumes of regions that are gone.
    pub fn gone(&self) -> Vec<VolumeId> {
        self.regions.gone()
    }

    /// Forgets the regions whose leases this host no longer holds.
    pub fn keep_regions(
        &self,
        is_held: impl Fn(VolumeId) -> bool,
        is_known: impl Fn(VolumeId) -> bool,
    ) {
        self.regions.keep(is_held, is_known);
    }
}
