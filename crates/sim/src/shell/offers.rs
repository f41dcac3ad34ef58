//! Questions for offers, to samples of the hosts that can lend by the news of gossip.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::Offer;
use aquifer_control::node::Input;
use aquifer_page::{Bytes, EXTENT_SIZE};
use rand::RngExt as _;
use rand::rngs::SmallRng;

use super::CallKind;
use crate::event::{Ask, CallId, HostNumber};
use crate::simulation::Simulation;

/// How many hosts get the question for offers at a time, as in the agent.
const SAMPLE: usize = 4;

/// The age at which news of a host is so old that gossip counts the host as down.
const DOWN: Duration = Duration::from_secs(5);

/// An agent's questions for offers, sample after sample.
#[derive(Debug)]
pub(super) struct Sampling {
    /// The hosts that it has asked or must not ask.
    asked: BTreeSet<HostNumber>,
    awaited: BTreeSet<CallId>,
    offers: Vec<Offer>,
}

impl Sampling {
    pub(super) fn awaits(&mut self, call: CallId) {
        self.awaited.insert(call);
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
    /// Asks samples of hosts for offers, until one can lend an extent.
    pub(super) fn ask_offers(&mut self, host: HostNumber) {
        let mut asked = self.hosts[host].parted.clone();
        asked.insert(host);
        if let Some(agent) = &mut self.hosts[host].agent {
            let sampling = Sampling { asked, awaited: BTreeSet::new(), offers: Vec::new() };
            agent.sampling = Some(sampling);
        }
        self.ask_sample(host);
    }

    fn ask_sample(&mut self, host: HostNumber) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(sampling) = &mut agent.sampling else { return };
        let sample = self.board.draw(&mut sampling.asked, self.now, &mut self.rng);
        if sample.is_empty() {
            let lenders = std::mem::take(&mut sampling.offers);
            agent.sampling = None;
            let stored = self.hosts[host].machine.stored_by_lease();
            return self.input(host, Input::Offers { lenders, stored });
        }
        sample.into_iter().for_each(|to| self.call(host, to, CallKind::Offer, Ask::Offer));
    }

    /// Takes an offer, or the end of a question without one.
    pub(super) fn offered(
        &mut self,
        host: HostNumber,
        call: CallId,
        offer: Option<(HostNumber, Bytes)>,
    ) {
        let offer = offer.map(|(lender, spare)| Offer::new(self.hosts[lender].name.clone(), spare));
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(sampling) = &mut agent.sampling else { return };
        sampling.awaited.remove(&call);
        sampling.offers.extend(offer);
        if !sampling.awaited.is_empty() {
            return;
        }
        if sampling.offers.iter().any(|offer| offer.spare >= Bytes(EXTENT_SIZE)) {
            let lenders = std::mem::take(&mut sampling.offers);
            agent.sampling = None;
            let stored = self.hosts[host].machine.stored_by_lease();
            return self.input(host, Input::Offers { lenders, stored });
        }
        self.ask_sample(host);
    }
}
