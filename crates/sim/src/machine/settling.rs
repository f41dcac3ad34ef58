//! The kernel's part: demand changes, pages leave RAM, and pages come back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_page::{Bytes, LeaseId, VolumeId};

use super::{Machine, Posting, Volume};
use crate::Costs;

/// Copies between RAM and volumes during one period.
#[derive(Debug)]
pub(crate) struct Flow<'a> {
    /// The leases that answer.
    pub(super) reached: &'a BTreeSet<LeaseId>,
    /// The bytes that the network can still carry.
    budget: Bytes,
    pub(super) postings: Vec<Posting>,
}

impl<'a> Flow<'a> {
    pub(super) fn new(reached: &'a BTreeSet<LeaseId>, budget: Bytes) -> Self {
        Self { reached, budget, postings: Vec::new() }
    }

    pub(super) fn postings(self) -> Vec<Posting> {
        self.postings
    }

    pub(super) fn budget(&self) -> Bytes {
        self.budget
    }

    pub(super) fn spend(&mut self, bytes: Bytes) {
        self.budget = self.budget.saturating_sub(bytes);
    }

    /// Writes up to `bytes` to the volume's leases. Returns the bytes written.
    pub(super) fn write(&mut self, volume: &mut Volume, bytes: Bytes) -> Bytes {
        if volume.is_detaching {
            return Bytes::ZERO;
        }
        let room = volume.bytes.saturating_sub(volume.used());
        self.fill(volume, bytes.min(room))
    }

    /// Writes up to `bytes`, which the volume already counts as used, to its leases.
    pub(super) fn fill(&mut self, volume: &mut Volume, bytes: Bytes) -> Bytes {
        let mut left = bytes.min(self.budget);
        let before = left;
        for (&lease, place) in &mut volume.places {
            if place.is_leaving || !self.reached.contains(&lease) {
                continue;
            }
            let part = left.min(place.borrowed.bytes.saturating_sub(place.placed));
            if part > Bytes::ZERO {
                place.placed += part;
                left = left - part;
                let lender = place.lender;
                self.postings.push(Posting { lender, lease, bytes: part, into: true });
            }
        }
        self.spend(before - left);
        before - left
    }

    /// Takes up to `bytes` out of the volume's leases. Returns the bytes taken.
    pub(super) fn take(&mut self, volume: &mut Volume, bytes: Bytes) -> Bytes {
        let mut left = bytes;
        for (&lease, place) in &mut volume.places {
            let part = left.min(place.placed);
            if part > Bytes::ZERO && self.reached.contains(&lease) {
                place.placed = place.placed - part;
                left = left - part;
                let lender = place.lender;
                self.postings.push(Posting { lender, lease, bytes: part, into: false });
            }
        }
        bytes - left
    }
}

impl Machine {
    /// Brings demand and its places up to date. Returns the entries for lenders' books.
    pub(crate) fn settle(
        &mut self,
        now: Duration,
        reached: &BTreeSet<LeaseId>,
        costs: &Costs,
    ) -> Vec<Posting> {
        let elapsed_s = now.saturating_sub(self.settled).as_secs_f64();
        self.settled = now;
        let mut flow = Flow::new(reached, costs.bandwidth.scaled(elapsed_s));
        let touched = (costs.touched * elapsed_s).min(1.0);
        self.settle_vms(now, touched, &mut flow);
        let demand = self.load.demand(now);
        self.follow(demand, &mut flow);
        self.push_out(&mut flow);
        self.bring_back(touched, &mut flow);
        self.leave_disk(&mut flow);
        flow.postings()
    }

    /// Changes the demand. New pages are in RAM. Programs free pages in RAM and pages elsewhere in
    /// proportion; pages that no lender answers for stay.
    fn follow(&mut self, demand: Bytes, flow: &mut Flow<'_>) {
        if demand >= self.demand {
            self.resident += demand - self.demand;
            self.demand = demand;
            return;
        }
        let gone = self.demand - demand;
        let elsewhere = self.demand.saturating_sub(self.resident);
        let share = u128::from(gone.0) * u128::from(elsewhere.0) / u128::from(self.demand.0);
        let mut left = gone - self.free_elsewhere(Bytes(share as u64), flow);
        let here = left.min(self.resident);
        self.resident = self.resident - here;
        left = left - here;
        left = left - self.free_elsewhere(left, flow);
        self.demand = demand + left;
    }

    fn free_elsewhere(&mut self, bytes: Bytes, flow: &mut Flow<'_>) -> Bytes {
        let mut left = bytes - take(&mut self.disk, bytes);
        for volume in swap(&mut self.volumes) {
            left = left - take(&mut volume.spilled, left);
            left = left - flow.take(volume, left);
        }
        bytes - left
    }

    /// Swaps out what does not fit: to leases, then to spill files of volumes, then to the disk.
    fn push_out(&mut self, flow: &mut Flow<'_>) {
        let out = self.excess().min(self.resident);
        self.resident = self.resident - out;
        let left = out - self.write(out, flow);
        let spilled = self.spill(left);
        self.disk += left - spilled;
    }

    /// Brings pages back for which there is RAM: all from the disk, and from volumes those that
    /// programs touch.
    fn bring_back(&mut self, touched: f64, flow: &mut Flow<'_>) {
        let room = self.free().min(flow.budget);
        let from_disk = take(&mut self.disk, room);
        flow.spend(from_disk);
        self.resident += from_disk;
        let mut room = self.free().min(flow.budget);
        for volume in swap(&mut self.volumes) {
            let wanted = room.min(volume.used().scaled(touched));
            let spilled = take(&mut volume.spilled, wanted);
            let read = spilled + flow.take(volume, wanted - spilled);
            flow.spend(read);
            room = room - read;
            self.resident += read;
        }
    }

    /// Moves pages from disks to leases with room: programs touch them, and the kernel swaps others
    /// out to the volumes, which have the higher priority.
    fn leave_disk(&mut self, flow: &mut Flow<'_>) {
        let swap = self.volumes.iter().filter(|(_, volume)| volume.is_swap());
        let ids: Vec<_> = swap.map(|(id, _)| *id).collect();
        for id in ids {
            let volume = self.volumes.get_mut(&id).filter(|volume| !volume.is_detaching);
            let spilled = volume.map_or(Bytes::ZERO, |volume| std::mem::take(&mut volume.spilled));
            let left = spilled - self.write(spilled, flow);
            if let Some(volume) = self.volumes.get_mut(&id) {
                volume.spilled += left;
            }
        }
        let written = self.write(self.disk, flow);
        self.disk = self.disk - written;
        let spilled = self.spill(self.disk);
        self.disk = self.disk - spilled;
    }

    /// Writes up to `bytes` to spill files: a volume takes pages also without a lease for them.
    fn spill(&mut self, bytes: Bytes) -> Bytes {
        let mut left = bytes;
        for volume in swap(&mut self.volumes).filter(|volume| !volume.is_detaching) {
            let spilled = left.min(volume.bytes.saturating_sub(volume.used()));
            volume.spilled += spilled;
            left = left - spilled;
        }
        bytes - left
    }

    /// Writes up to `bytes` to leases with room. Returns the bytes written.
    pub(super) fn write(&mut self, bytes: Bytes, flow: &mut Flow<'_>) -> Bytes {
        let mut left = bytes;
        for volume in swap(&mut self.volumes) {
            left = left - flow.write(volume, left);
        }
        bytes - left
    }
}

fn swap(volumes: &mut BTreeMap<VolumeId, Volume>) -> impl Iterator<Item = &mut Volume> {
    volumes.values_mut().filter(|volume| volume.is_swap())
}

/// Takes up to `bytes` off an amount. Returns the bytes taken.
pub(super) fn take(amount: &mut Bytes, bytes: Bytes) -> Bytes {
    let taken = bytes.min(*amount);
    *amount = *amount - taken;
    taken
}
