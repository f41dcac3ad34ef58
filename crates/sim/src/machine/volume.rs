//! A borrowed volume: its extents in leases and in the local spill file.

use std::collections::BTreeMap;

use aquifer_control::node::{CopyReading, Health, LeaseReading, VolumeReading};
use aquifer_control::{BorrowedLease, Cause, LiveVolume, Owner};
use aquifer_page::{Bytes, Group, LeaseId, VolumeId};

use crate::event::HostNumber;

/// A borrowed volume: the kernel swaps to it, or it is the memory of a VM.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) bytes: Bytes,
    pub(crate) owner: Owner,
    group: Group,
    cause: Cause,
    pub(crate) places: BTreeMap<LeaseId, Place>,
    /// The leases that hold second copies, each with the lease that it is a copy of.
    pub(crate) copies: BTreeMap<LeaseId, (LeaseId, Place)>,
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
        let LiveVolume { bytes, owner, group, cause, leases, .. } = live;
        let place = |lease: BorrowedLease| {
            let lender = lender_of(&lease);
            (lease.lease, Place::new(lease, lender))
        };
        let places = leases.into_iter().map(place).collect();
        let (copies, spilled) = (BTreeMap::new(), Bytes::ZERO);
        Self { bytes, owner, group, cause, places, copies, spilled, is_detaching: false }
    }

    /// Returns the volume as the next host has it, after a move.
    pub(crate) fn of_next_generation(mut self) -> Self {
        self.places.values_mut().for_each(|place| place.borrowed.generation += 1);
        self.copies.clear();
        self
    }

    /// Returns the record from which the next agent continues.
    pub(crate) fn live(&self, volume: VolumeId) -> LiveVolume {
        let leases = self.places.values().map(|place| place.borrowed.clone()).collect();
        let copy = |(of, copy): &(LeaseId, Place)| (*of, copy.borrowed.clone());
        let copies = self.copies.values().map(copy).collect();
        let (owner, group) = (self.owner.clone(), self.group.clone());
        LiveVolume { volume, bytes: self.bytes, owner, group, cause: self.cause, leases, copies }
    }

    /// Returns whether the kernel swaps to it.
    pub(crate) fn is_swap(&self) -> bool {
        self.owner.is_swap()
    }

    /// Returns whether it uses a lease.
    pub(crate) fn has(&self, lease: LeaseId) -> bool {
        self.places.contains_key(&lease) || self.copies.contains_key(&lease)
    }

    /// Removes a lease, with the second copies of its pages.
    pub(crate) fn remove(&mut self, lease: LeaseId) {
        self.places.remove(&lease);
        self.copies.retain(|copy, (of, _)| *copy != lease && *of != lease);
    }

    /// Begins second copies of a lease. Returns whether it can.
    pub(crate) fn add_copy(&mut self, of: LeaseId, copy: Place) -> bool {
        let may = self.places.get(&of).is_some_and(|place| !place.is_leaving)
            && !self.copies.values().any(|(known, _)| *known == of);
        if may {
            self.copies.insert(copy.borrowed.lease, (of, copy));
        }
        may
    }

    pub(crate) fn placed(&self) -> Bytes {
        self.places.values().map(|place| place.placed).sum()
    }

    /// Returns how much of what this lease holds finds no room in the others.
    pub(crate) fn lacks_without(&self, lease: LeaseId) -> Bytes {
        let holds = self.places.get(&lease).map_or(Bytes::ZERO, |place| place.placed);
        let others = self.places.values().filter(|place| place.borrowed.lease != lease);
        let free = |place: &Place| place.borrowed.bytes.saturating_sub(place.placed);
        holds.saturating_sub(others.map(free).sum())
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
            copy: self.copies.values().find(|(of, _)| *of == place.borrowed.lease).map(
                |(_, copy)| CopyReading {
                    lease: copy.borrowed.lease,
                    first_answers: health(place) == Health::Ok,
                    answers: health(copy) == Health::Ok,
                    lacks: Bytes::ZERO,
                    first_lacks: Bytes::ZERO,
                },
            ),
        };
        VolumeReading {
            volume,
            spilled: self.spilled,
            last_error: None,
            takes_copies: true,
            leases: self.places.values().map(lease).collect(),
        }
    }
}
