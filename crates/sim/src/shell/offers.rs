//! Questions for offers, to samples of the hosts that can lend by the news of gossip.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::Offer;
use aquifer_control::node::Input;
use aquifer_page::{Bytes, EXTENT_SIZE};
use rand::RngExt as _;
use rand::rngs::SmallRng;

use super::search::Search;
use super::{Agent, CallKind};
use crate::event::{Ask, CallId, HostNumber};
use crate::simulation::Simulation;

/// How many hosts get the question for offers at a time, as in the agent.
const SAMPLE: usize = 4;

/// The age at which news of a host is so old that gossip counts the host as down.
const DOWN: Duration = Duration::from_secs(5);

/// What an agent asks offers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Memory for swap and regions.
    Leases,
    /// Room for a VM.
    Rooms,
}

/// The offer of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    /// The bytes for swap, or the room for a VM.
    pub(crate) spare: Bytes,
    pub(crate) for_regions: Bytes,
    pub(crate) for_copies: Bytes,
}

/// An agent's questions for offers, sample after sample.
#[derive(Debug)]
pub(super) struct Sampling {
    /// The hosts that it has asked or must not ask.
    asked: BTreeSet<HostNumber>,
    awaited: BTreeSet<CallId>,
    offers: Vec<(HostNumber, Offered)>,
}

impl Sampling {
    pub(super) fn awaits(&mut self, call: CallId) {
        self.awaited.insert(call);
    }
}

impl Agent {
    pub(super) fn sampling(&mut self, slot: Slot) -> Option<&mut Sampling> {
        match slot {
            Slot::Leases => self.sampling.as_mut(),
            Slot::Rooms => self.search.as_mut()?.sampling.as_mut(),
        }
    }

    fn end_sampling(&mut self, slot: Slot) -> Vec<(HostNumber, Offered)> {
        let ended = match slot {
            Slot::Leases => self.sampling.take(),
            Slot::Rooms => self.search.as_mut().and_then(|search| search.sampling.take()),
        };
        ended.map_or_else(Vec::new, |sampling| sampling.offers)
    }

    /// Returns whether the offers so far suffice.
    fn suffices(&self, slot: Slot, offers: &[(HostNumber, Offered)]) -> bool {
        let any = |least| offers.iter().any(|(_, offer)| offer.spare >= least);
        match (slot, self.node.requested()) {
            (Slot::Rooms, _) => self.search.as_ref().is_none_or(|search| any(search.cache())),
            (Slot::Leases, Bytes::ZERO) => any(Bytes(EXTENT_SIZE)),
            (Slot::Leases, need) => {
                let for_regions = offers.iter().map(|(_, offer)| offer.for_regions);
                for_regions.sum::<Bytes>() >= need
            }
        }
    }
}

/// What gossip tells all hosts of all: their spare memory at their last periods.
#[derive(Debug)]
pub(crate) struct Board {
    told: Vec<Option<Duration>>,
    likely: Numbers,
    unlikely: Numbers,
}

/// A set of hosts from which a draw takes constant time.
#[derive(Debug, Default)]
struct Numbers {
    members: Vec<HostNumber>,
    places: BTreeMap<HostNumber, usize>,
}

impl Board {
    pub(crate) fn new(hosts: usize) -> Self {
        let told = vec![None; hosts];
        Self { told, likely: Numbers::default(), unlikely: Numbers::default() }
    }

    pub(super) fn tell(&mut self, host: HostNumber, spare: Bytes, now: Duration) {
        self.told[host] = Some(now);
        let is_likely = spare >= Bytes(EXTENT_SIZE);
        let (into, out_of) = match is_likely {
            true => (&mut self.likely, &mut self.unlikely),
            false => (&mut self.unlikely, &mut self.likely),
        };
        out_of.remove(host);
        into.insert(host);
    }

    /// Draws the next sample: hosts that can lend by their news first.
    fn draw(
        &self,
        asked: &mut BTreeSet<HostNumber>,
        now: Duration,
        rng: &mut SmallRng,
    ) -> Vec<HostNumber> {
        let mut sample = Vec::new();
        for numbers in [&self.likely, &self.unlikely] {
            while sample.len() < SAMPLE {
                let is_up = |host: HostNumber| self.told[host].is_some_and(|at| now - at < DOWN);
                let Some(host) = numbers.draw(|host| is_up(host) && !asked.contains(&host), rng)
                else {
                    break;
                };
                asked.insert(host);
                sample.push(host);
            }
        }
        sample
    }
}

impl Numbers {
    fn insert(&mut self, host: HostNumber) {
        if let std::collections::btree_map::Entry::Vacant(place) = self.places.entry(host) {
            place.insert(self.members.len());
            self.members.push(host);
        }
    }

    fn remove(&mut self, host: HostNumber) {
        if let Some(place) = self.places.remove(&host) {
            self.members.swap_remove(place);
            if let Some(moved) = self.members.get(place) {
                self.places.insert(*moved, place);
            }
        }
    }

    /// Draws one of those that `fits`. A few tries usually suffice; else it looks at all.
    fn draw(&self, fits: impl Fn(HostNumber) -> bool, rng: &mut SmallRng) -> Option<HostNumber> {
        if self.members.is_empty() {
            return None;
        }
        for _ in 0..8 {
            let host = self.members[rng.random_range(0..self.members.len())];
            if fits(host) {
                return Some(host);
            }
        }
        let fitting: Vec<_> = self.members.iter().copied().filter(|host| fits(*host)).collect();
        (!fitting.is_empty()).then(|| fitting[rng.random_range(0..fitting.len())])
    }
}

impl Simulation {
    /// Asks samples of hosts for offers, until they suffice.
    pub(super) fn sample(&mut self, host: HostNumber, slot: Slot) {
        let mut asked = self.hosts[host].parted.clone();
        asked.insert(host);
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let sampling = |asked| Sampling { asked, awaited: BTreeSet::new(), offers: Vec::new() };
        match (slot, &mut agent.search) {
            (Slot::Leases, _) => agent.sampling = Some(sampling(asked)),
            (Slot::Rooms, Some(search)) => {
                asked.extend(search.excepted());
                search.sampling = Some(sampling(asked));
            }
            (Slot::Rooms, None) => {}
        }
        self.ask_sample(host, slot);
    }

    fn ask_sample(&mut self, host: HostNumber, slot: Slot) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let below = agent.search.as_ref().map(Search::below);
        let Some(sampling) = agent.sampling(slot) else { return };
        let sample = self.board.draw(&mut sampling.asked, self.now, &mut self.rng);
        if sample.is_empty() {
            return self.end_sampling(host, slot);
        }
        let ask = match (slot, below) {
            (Slot::Rooms, Some(below)) => Ask::Room(below),
            _ => Ask::Offer,
        };
        for to in sample {
            self.call(host, to, CallKind::Offer(slot), ask.clone());
        }
    }

    /// Takes an offer, or the end of a question without one.
    pub(super) fn offered(
        &mut self,
        host: HostNumber,
        (call, slot): (CallId, Slot),
        offer: Option<(HostNumber, Offered)>,
    ) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(sampling) = agent.sampling(slot) else { return };
        sampling.awaited.remove(&call);
        sampling.offers.extend(offer);
        if !sampling.awaited.is_empty() {
            return;
        }
        let offers = std::mem::take(&mut sampling.offers);
        let suffices = agent.suffices(slot, &offers);
        if let Some(sampling) = agent.sampling(slot) {
            sampling.offers = offers;
        }
        match suffices {
            true => self.end_sampling(host, slot),
            false => self.ask_sample(host, slot),
        }
    }

    fn end_sampling(&mut self, host: HostNumber, slot: Slot) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let offers = agent.end_sampling(slot);
        if slot == Slot::Rooms {
            let rooms = offers.into_iter().map(|(host, offer)| (host, offer.spare));
            return self.found_rooms(host, rooms.collect());
        }
        let offer = |(lender, offered): (HostNumber, Offered)| {
            let Offered { spare, for_regions, for_copies } = offered;
            let host = self.hosts[lender].name.clone();
            Offer { host, spare, for_regions, for_copies, zone: None }
        };
        let lenders = offers.into_iter().map(offer).collect();
        let stored = self.hosts[host].machine.stored_by_lease();
        self.input(host, Input::Offers { lenders, stored });
    }
}
