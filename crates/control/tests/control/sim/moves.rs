//! Regions that move from host to host with their leases.

use std::collections::BTreeSet;

use aquifer_control::{Event, LiveVolume, VolumeState};
use aquifer_page::VolumeId;

use super::{Network, Packet};

/// A region that may move.
#[derive(Clone, Debug)]
pub(super) struct RegionMove {
    volume: VolumeId,
    from: usize,
    to: usize,
    /// Whether the destination waits for the region.
    expected: bool,
}

impl Network {
    /// Begins to move a region: asks its lenders to let the destination use its leases.
    pub fn begin_region_move(&mut self, from: usize, at: usize, to: usize) {
        let regions = self.hosts[from].volumes.values().filter(|live| !live.owner.is_swap());
        let regions: Vec<_> = regions.cloned().collect();
        if from == to || regions.is_empty() {
            return;
        }
        let region = &regions[at % regions.len()];
        // The agent refuses: a host does not lend to itself.
        if region.leases.iter().any(|lease| lease.lender == self.hosts[to].name) {
            return;
        }
        // An attempt that has failed leaves its permits behind.
        self.moves.retain(|one| one.volume != region.volume);
        self.missed(region.volume);
        self.moves.push(RegionMove { volume: region.volume, from, to, expected: false });
        for lease in &region.leases {
            let event = Event::Permit {
                from: self.hosts[from].name.clone(),
                lease: lease.lease,
                generation: lease.generation,
                to: self.hosts[to].name.clone(),
            };
            self.wire.push(Packet { to: self.index(&lease.lender), event });
        }
    }

    /// Does the next step of a region's move.
    pub fn go_on_moving(&mut self, at: usize) {
        if self.moves.is_empty() {
            return;
        }
        let at = at % self.moves.len();
        let RegionMove { volume, from, to, expected } = self.moves[at].clone();
        let Some(live) = self.hosts[from].volumes.get(&volume).cloned() else {
            self.moves.remove(at);
            return self.missed(volume);
        };
        if !self.is_permitted(from, to, &live) {
            return;
        }
        if !expected {
            let leases: BTreeSet<_> = live.leases.iter().map(|lease| lease.lease).collect();
            self.hosts[to].expected.insert(volume, leases.clone());
            self.hosts[to].awaited.insert(volume);
            self.moves[at].expected = true;
            return self.step(to, Event::Expected { volume, leases });
        }
        self.moves.remove(at);
        self.hosts[from].volumes.remove(&volume);
        self.hosts[from].handed_over.insert(volume, to);
        let mut live = live;
        live.leases.iter_mut().for_each(|lease| lease.generation += 1);
        let host = &mut self.hosts[to];
        host.expected.remove(&volume);
        host.handed_over.remove(&volume);
        host.volumes.insert(volume, live);
    }

    /// Forgets to which hosts this one has moved regions.
    pub fn forget_moves(&mut self, index: usize) {
        self.hosts[index].handed_over.clear();
    }

    /// Returns whether the lenders' records let this host use all leases of a volume.
    pub(super) fn may_use(&self, index: usize, live: &LiveVolume) -> bool {
        let name = &self.hosts[index].name;
        live.leases.iter().filter(|lease| !self.expired.contains(&lease.lease)).all(|lease| {
            let lender = &self.hosts[self.index(&lease.lender)];
            let record = lender.store.get(&lease.lease);
            record.is_some_and(|lent| lent.borrower == *name || lent.next.contains(name))
        })
    }

    /// Returns whether the lenders' records let a region move on from the host that has it now. An
    /// older record may name the destination as a former holder, and permits nothing.
    fn is_permitted(&self, from: usize, to: usize, live: &LiveVolume) -> bool {
        let (from, to) = (&self.hosts[from].name, &self.hosts[to].name);
        live.leases.iter().filter(|lease| !self.expired.contains(&lease.lease)).all(|lease| {
            let record = self.hosts[self.index(&lease.lender)].store.get(&lease.lease);
            record.is_some_and(|lent| {
                (&lent.borrower, lent.generation) == (from, lease.generation)
                    && lent.next.contains(to)
            })
        })
    }

    /// Ends the wait of all hosts for a region.
    fn missed(&mut self, volume: VolumeId) {
        for index in 0..self.hosts.len() {
            if self.hosts[index].expected.remove(&volume).is_some() {
                self.hosts[index].awaited.remove(&volume);
                self.step(index, Event::Missed { volume });
            }
        }
    }

    /// Reports the regions that have left or come, as the agent does after it looks.
    pub(super) fn follow_regions(&mut self, index: usize) {
        let host = &self.hosts[index];
        let volumes = host.controller.volumes();
        let known = |volume: &VolumeId| volumes.iter().any(|known| known.volume == *volume);
        let arrived =
            host.volumes.values().filter(|live| !live.owner.is_swap() && !known(&live.volume));
        let arrived: Vec<_> = arrived.cloned().collect();
        let moved = volumes.iter().filter(|known| {
            known.state == VolumeState::Active
                && !host.volumes.contains_key(&known.volume)
                && !host.evacuates(known.volume)
        });
        let moved =
            moved.filter_map(|known| Some((known.volume, *host.handed_over.get(&known.volume)?)));
        for (volume, to) in moved.collect::<Vec<_>>() {
            let to = self.hosts[to].name.clone();
            self.step(index, Event::Moved { volume, to });
        }
        for live in arrived {
            self.hosts[index].awaited.remove(&live.volume);
            self.step(index, Event::Arrived(live));
        }
        // A region may come and go between two looks.
        let host = &mut self.hosts[index];
        let stays = |volume: &VolumeId| {
            host.expected.contains_key(volume) || host.volumes.contains_key(volume)
        };
        let missed: Vec<_> = host.awaited.iter().filter(|volume| !stays(volume)).copied().collect();
        missed.iter().for_each(|volume| _ = host.awaited.remove(volume));
        missed.into_iter().for_each(|volume| self.step(index, Event::Missed { volume }));
    }

    /// Sends the lenders of a host's regions the word that the host holds their leases.
    pub fn renew(&mut self, index: usize) {
        let known: BTreeSet<_> =
            self.hosts[index].controller.volumes().iter().map(|known| known.volume).collect();
        let regions = self.hosts[index]
            .volumes
            .values()
            .filter(|live| !live.owner.is_swap() && known.contains(&live.volume));
        let leases: Vec<_> = regions.flat_map(|live| live.leases.clone()).collect();
        let by = self.hosts[index].name.clone();
        for lease in leases {
            let event =
                Event::Taken { by: by.clone(), lease: lease.lease, generation: lease.generation };
            self.wire.push(Packet { to: self.index(&lease.lender), event });
        }
    }

    /// Ends all moves that are under way: their regions stay.
    pub fn conclude_moves(&mut self) {
        for RegionMove { volume, .. } in std::mem::take(&mut self.moves) {
            self.missed(volume);
        }
    }
}
