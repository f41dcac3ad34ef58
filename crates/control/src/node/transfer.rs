//! Leases that move with their regions: a lender's answers to the hosts, and the regions that leave
//! this host or come to it.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{HostName, LeaseId, VolumeId};

use super::orders::failed;
use super::{Answer, Node, Ticket, Work};
use crate::{Event, LentLease, LiveVolume, VolumeState};

/// The orders to let another host use a lease that wait until this is recorded.
pub(super) type Permits = BTreeMap<LeaseId, Vec<(HostName, Ticket)>>;

impl Node {
    /// Lets `to` use a lease of `from`. The answer waits until the agent has recorded it.
    pub(super) fn permit(
        &mut self,
        from: &HostName,
        (lease, generation): (LeaseId, u32),
        to: &HostName,
        ticket: Ticket,
    ) {
        if !self.settings.peers.contains(to) {
            let host = &self.controller.facts().host;
            let error = format!("{to} is not a peer of {host}, which lends lease {lease}");
            return self.answer(ticket, failed(error, Some("make it a peer of all lenders")));
        }
        let (from, to) = (from.clone(), to.clone());
        self.step(Event::Permit { from: from.clone(), lease, generation, to: to.clone() });
        let lent = self.controller.lent().into_iter().map(|lent| lent.lease);
        let is_allowed = |lent: LentLease| {
            (lent.lease, &lent.borrower) == (lease, &from) && lent.next.contains(&to)
        };
        if lent.into_iter().any(is_allowed) {
            self.lending.permits.entry(lease).or_default().push((to, ticket));
        } else {
            let error = format!("{from} holds no lease {lease} that can move with its region");
            self.answer(ticket, failed(error, None));
        }
    }

    /// Answers the orders that a record fulfils. A later record fulfils the others.
    pub(super) fn answer_permits(&mut self, lent: &LentLease) {
        let waiting = self.lending.permits.remove(&lent.lease).unwrap_or_default();
        let (done, waiting): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(to, _)| lent.next.contains(to));
        for (_, ticket) in done {
            self.answer(ticket, Answer::Permitted);
        }
        if !waiting.is_empty() {
            self.lending.permits.insert(lent.lease, waiting);
        }
    }

    pub(super) fn refuse_permits(&mut self, lease: LeaseId, why: &str) {
        for (to, ticket) in self.lending.permits.remove(&lease).into_iter().flatten() {
            let error = format!("{to} may not use lease {lease}: {why}");
            self.answer(ticket, failed(error, None));
        }
    }

    /// Makes a host the borrower of the leases that have moved there.
    pub(super) fn take_over(&mut self, by: &HostName, generations: &BTreeMap<LeaseId, u32>) {
        for (&lease, &generation) in generations {
            self.step(Event::Taken { by: by.clone(), lease, generation });
        }
    }

    /// Returns the leases of this host that have moved, or may be moving, to another host.
    pub(super) fn moved_from(&self, host: &HostName) -> BTreeSet<LeaseId> {
        let lent = self.controller.lent().into_iter().map(|lent| lent.lease);
        let moved = lent.filter(|lent| lent.borrower != *host && lent.generation > 0);
        moved.map(|lent| lent.lease).collect()
    }

    /// Follows the regions that have left this host, have come, or will not come.
    pub(super) fn follow_regions(
        &mut self,
        moved: Vec<(VolumeId, HostName)>,
        arrived: Vec<LiveVolume>,
        missed: Vec<VolumeId>,
    ) {
        for (volume, to) in moved {
            if self.is_idle(volume) {
                self.step(Event::Moved { volume, to });
            }
        }
        for live in arrived {
            // Its lenders learn at once that this host holds its leases.
            self.borrowing.renewed = None;
            self.step(Event::Arrived(live));
        }
        missed.into_iter().for_each(|volume| self.step(Event::Missed { volume }));
    }

    /// Returns whether a volume is in use and no work on it or its leases is in progress.
    pub(super) fn is_idle(&self, volume: VolumeId) -> bool {
        let volumes = self.controller.volumes();
        let is_active = volumes
            .iter()
            .any(|known| known.volume == volume && known.state == VolumeState::Active);
        let borrowed = self.controller.borrowed();
        let mut leases = borrowed.iter().filter(|held| held.volume == volume);
        is_active
            && !self.work.contains(&Work::Volume(volume))
            && !leases.any(|held| self.is_worked_on(held.lease.lease))
    }

    /// Returns whether a lease is being vacated, or about to hold second copies.
    pub(super) fn is_worked_on(&self, lease: LeaseId) -> bool {
        self.work.contains(&Work::Lease(lease)) || self.work.contains(&Work::Copy(lease))
    }
}
