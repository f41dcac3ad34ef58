//! A borrowed volume: its extents in leases and in the local spill file.

use std::collections::BTreeMap;

use aquifer_control::node::{Health, LeaseReading, VolumeReading};
use aquifer_control::{BorrowedLease, Cause, LiveVolume, Owner};
use aquifer_page::{Bytes, Group, LeaseId, VolumeId};

use crate::event::HostNumber;

/// A borrowed volume, which the kernel swaps to.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) bytes: Bytes,
    group: Group,
    cause: Cause,
    pub(crate) places: BTreeMap<LeaseId, Place>,
    pub(crate) spilled: Bytes,
    /// Whether swapoff is under way.
    pub(crate) is_detaching: bool,
}

/// A lease under a volume.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) borrowed: BorrowedLease,
    pub(crate) lender: HostNumber,
    /// The bytes in the lease, by the book of the borrower.
    pub(crate) placed: Bytes,
    /// Whether the volume is moving its pages out of the lease.
    pub(crate) is_leaving: bool,
}

impl Place {
    pub(crate) fn new(borrowed: BorrowedLease, lender: HostNumber) -> Self {
        Self { borrowed, lender, placed: Bytes::ZERO, is_leaving: false }
    }
}

impl Volume {
    pub(crate) fn new(live: LiveVolume, lender_of: impl Fn(&BorrowedLease) -> HostNumber) -> Self {
        let LiveVolume { bytes, group, cause, leases, .. } = live;
        let place = |lease: BorrowedLease| {
            let lender = lender_of(&lease);
            (lease.lease, Place::new(lease, lender))
        };
        let places = leases.into_iter().map(place).collect();
        Self { bytes, group, cause, places, spilled: Bytes::ZERO, is_detaching: false }
    }

    /// Returns the record from which the next agent continues.
    pub(crate) fn live(&self, volume: VolumeId) -> LiveVolume {
        let leases = self.places.values().map(|place| place.borrowed.clone()).collect();
        let (bytes, group, cause) = (self.bytes, self.group.clone(), self.cause);
        LiveVolume { volume, bytes, owner: Owner::Swap, group, cause, leases }
    }

    pub(crate) fn placed(&self) -> Bytes {
        self.places.values().map(|place| place.placed).sum()
    }

    pub(crate) fn used(&self) -> Bytes {
        self.placed() + self.spilled
    }

    /// Returns what the agent reads of this volume. `health` tells of a lease.
    pub(crate) fn reading(
        &self,
        volume: VolumeId,
        health: impl Fn(&Place) -> Health,
    ) -> VolumeReading {
        let lease = |place: &Place| LeaseReading {
            lease: place.borrowed.lease,
            lender: place.borrowed.lender.clone(),
            placed: place.placed,
            health: health(place),
        };
        VolumeReading {
            volume,
            spilled: self.spilled,
            last_error: None,
            leases: self.places.values().map(lease).collect(),
        }
    }
}
