//! Memory of other hosts for this host's regions: requests, their answers, and regions that are
//! gone.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{Bytes, HostName, VolumeId};

use super::offers::Waiting;
use super::orders::failed;
use super::{Answer, Node, Ticket};
use crate::{Action, Decision, Event, LiveVolume, RegionRequest, What};

/// The requests that wait for their leases, by volume.
pub(super) type Requests = BTreeMap<VolumeId, Ticket>;

impl Node {
    /// Takes a request for a region. It waits for offers, and then for its turn.
    pub(super) fn borrow_for(&mut self, request: RegionRequest, ticket: Ticket) {
        let volume = request.volume;
        let is_known = self.orders.requests.contains_key(&volume)
            || (self.holds(volume) && request.bytes > self.lacks(&request));
        if self.belonging.has_left {
            return self.answer(ticket, failed("this host leaves its cluster".to_owned(), None));
        }
        if is_known {
            let error = format!("the memory for region {} is asked for already", request.region);
            return self.answer(ticket, failed(error, None));
        }
        self.orders.requests.insert(volume, ticket);
        self.with_offers(Waiting::BorrowFor(request));
    }

    /// Answers a request with the leases that are for it.
    pub(super) fn answer_with(&mut self, live: &LiveVolume) {
        if let Some(ticket) = self.orders.requests.remove(&live.volume) {
            self.answer(ticket, Answer::Provided(live.clone()));
        }
    }

    /// Answers a request that gets no leases.
    pub(super) fn note_lack(&mut self, decision: &Decision) {
        let What::Lacks { volume, wanted, refusal, .. } = &decision.what else { return };
        let Some(ticket) = self.orders.requests.remove(volume) else { return };
        let answer = match refusal {
            None => Answer::NobodyLends(*wanted),
            Some(_) => {
                let help = "give the region less memory, or raise 'max' in [borrow] of the agent's \
                            configuration";
                failed(format!("this host {decision}"), Some(help))
            }
        };
        self.answer(ticket, answer);
    }

    /// Returns the bytes that requests of regions wait for: offers should reach as far.
    pub fn requested(&self) -> Bytes {
        self.offers.requested().saturating_add(self.controller.requested())
    }

    /// Returns whether this host still holds the leases of a region's volume, or is about to hand
    /// them over.
    pub fn holds(&self, volume: VolumeId) -> bool {
        self.controller.borrowed().iter().any(|held| held.volume == volume)
    }

    /// Returns whether the controller has this volume, perhaps without a lease.
    pub fn knows(&self, volume: VolumeId) -> bool {
        self.controller.volumes().iter().any(|known| known.volume == volume)
    }

    /// Returns how much less this host holds for a region than the region's size.
    fn lacks(&self, request: &RegionRequest) -> Bytes {
        let region = self.own.read.regions.iter().find(|region| region.name == request.region);
        let size = region.map_or(Bytes::ZERO, |region| region.size);
        size.saturating_sub(self.held(request.volume))
    }

    /// Returns whether a region has pages at this lender.
    pub(super) fn lends_to_regions(&self, lender: &HostName) -> bool {
        let volumes = self.controller.volumes().into_iter();
        let regions = volumes.filter(|volume| !volume.owner.is_swap());
        let regions: BTreeSet<_> = regions.map(|volume| volume.volume).collect();
        let borrowed = self.controller.borrowed();
        borrowed.iter().any(|held| held.lease.lender == *lender && regions.contains(&held.volume))
    }

    /// Gives back the leases of a region that is gone. The volume may have become busy since the
    /// search.
    pub(super) fn region_gone(&mut self, volume: VolumeId) {
        let is_of_region = self
            .controller
            .volumes()
            .iter()
            .any(|known| known.volume == volume && !known.owner.is_swap());
        if is_of_region && self.is_idle(volume) {
            self.step(Event::Deactivated { volume });
        }
    }
}

/// Returns the volume of a region that gets leases by this action.
pub(super) fn provided(action: &Action) -> Option<LiveVolume> {
    match action {
        Action::Activate(live) | Action::Extend(live) if !live.owner.is_swap() => {
            Some(live.clone())
        }
        _ => None,
    }
}
