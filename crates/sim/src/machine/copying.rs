//! The steps of swapoff and of moves between leases, an extent at a time.

use std::collections::BTreeSet;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, VolumeId};

use super::settling::take;
use super::{Flow, Machine, Posting};

/// The result of one step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    /// Nothing is left to copy.
    All,
    /// These bytes were copied.
    Some(Bytes),
    /// No lender of the pages that are left answers.
    Nothing,
}

/// What a copy empties.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// A whole volume, into RAM.
    Volume(VolumeId),
    /// A lease of a volume, into its other leases or its spill file.
    Lease(VolumeId, LeaseId),
}

impl Machine {
    /// Copies the next extent out of `target`. Returns the entries for lenders' books.
    pub(crate) fn copy(
        &mut self,
        target: Target,
        reached: &BTreeSet<LeaseId>,
    ) -> (Copied, Vec<Posting>) {
        let mut flow = Flow::new(reached, Bytes(u64::MAX));
        let copied = match target {
            Target::Volume(volume) => self.swap_in(volume, &mut flow),
            Target::Lease(volume, lease) => self.vacate(volume, lease, &mut flow),
        };
        (copied, flow.postings())
    }

    /// Brings an extent of a volume back to RAM. What does not fit goes to other volumes, else to
    /// the disk.
    fn swap_in(&mut self, id: VolumeId, flow: &mut Flow<'_>) -> Copied {
        let Some(volume) = self.volumes.get_mut(&id).filter(|v| v.used() > Bytes::ZERO) else {
            return Copied::All;
        };
        let spilled = take(&mut volume.spilled, Bytes(EXTENT_SIZE));
        let read = spilled + flow.take(volume, Bytes(EXTENT_SIZE) - spilled);
        if read == Bytes::ZERO {
            return Copied::Nothing;
        }
        let fits = read.min(self.free());
        self.resident += fits;
        let left = read - fits;
        let written = self.write(left, flow);
        self.disk += left - written;
        Copied::Some(read)
    }

    /// Moves an extent out of a lease.
    fn vacate(&mut self, id: VolumeId, lease: LeaseId, flow: &mut Flow<'_>) -> Copied {
        let Some(volume) = self.volumes.get_mut(&id) else { return Copied::All };
        let Some(place) = volume.places.get_mut(&lease) else { return Copied::All };
        let part = place.placed.min(Bytes(EXTENT_SIZE));
        if part == Bytes::ZERO {
            return Copied::All;
        }
        if !flow.reached.contains(&lease) {
            return Copied::Nothing;
        }
        place.placed = place.placed - part;
        let lender = place.lender;
        flow.postings.push(Posting { lender, lease, bytes: part, into: false });
        let moved = flow.fill(volume, part);
        volume.spilled += part - moved;
        Copied::Some(part)
    }
}
