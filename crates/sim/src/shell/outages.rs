//! Drains, crashes of agents, their restarts, and hosts that the network cuts off.

use std::time::Duration;

use aquifer_control::node::{Input, KeySettings, Node, Settings};
use aquifer_control::{Controller, LiveVolume, Restored};
use rand::RngExt as _;

use super::{Agent, Known};
use crate::event::{Event, HostNumber};
use crate::invariants::Rule;
use crate::simulation::Simulation;

/// The shortest outage, as a share of the longest.
const LEAST_OUTAGE: f64 = 0.1;

const HOUR_S: f64 = 3600.0;

impl Simulation {
    /// Starts an agent, which continues from what it finds on its host.
    pub(crate) fn start(&mut self, host: HostNumber) {
        let (peers, seed) = (self.peers(host), self.rng.random());
        let at = &mut self.hosts[host];
        let machine = &mut at.machine;
        machine.store.values_mut().for_each(|kept| kept.is_freeing = false);
        let found = Restored {
            lent: machine.store.values().map(|kept| (kept.lent.clone(), uris(host))).collect(),
            volumes: machine.volumes_here().map(|(id, volume)| volume.live(id)).collect(),
            expected: machine.expected(),
        };
        let expected = found.expected.keys().copied().collect();
        let (swap, regions): (Vec<_>, Vec<_>) =
            found.volumes.iter().partition(|live| live.owner.is_swap());
        let ids = |live: Vec<&LiveVolume>| live.into_iter().map(|live| live.volume).collect();
        let known = Known { swap: ids(swap), regions: ids(regions), expected };
        let (name, config) = (at.name.clone(), self.scenario.config.clone());
        let controller = Controller::restore(name, config, seed, Duration::ZERO, found);
        let (before, role) = (at.role, controller.role());
        let (period, source) = (self.scenario.period, "host".to_owned());
        let move_after = self.scenario.move_after;
        let keys = KeySettings::default();
        let settings = Settings { period, source, peers, move_after, keys };
        let node = Node::new(controller, settings);
        at.agent = Some(Agent::new(node, self.now, known));
        at.starts += 1;
        if !at.change_role(self.now, role) {
            let name = at.name.clone();
            self.violate(Rule::NoEdge { host: name, from: before, to: role }, &[host]);
        }
        self.touch(host);
        if self.hosts[host].machine.is_drained {
            self.vacate(host, true);
        }
    }

    pub(crate) fn plan_drain(&mut self, host: HostNumber) {
        if let Some(wait) = self.wait_for(self.scenario.faults.drains) {
            self.agenda.enter(self.now + wait, Event::Drain(host, true));
        }
    }

    /// Begins a drain, or ends it. The operator waits for an agent to give the order to.
    pub(crate) fn drain(&mut self, host: HostNumber, on: bool) {
        if on && self.scenario.faults.drains <= 0.0 {
            return;
        }
        if self.hosts[host].agent.is_none() {
            let at = self.now + self.scenario.faults.longest;
            return self.agenda.enter(at, Event::Drain(host, on));
        }
        self.hosts[host].note(self.now, format!("gets the order to drain: {on}"));
        self.vacate(host, on);
        if on {
            self.tally.fleet.moves.drains += 1;
            let lasts = self.time_up_to(self.scenario.faults.longest_drain, LEAST_OUTAGE);
            self.agenda.enter(self.now + lasts, Event::Drain(host, false));
        } else {
            self.plan_drain(host);
        }
    }

    /// Orders the drain of a host with its VMs, or its end, and records it for the next agent.
    pub(super) fn vacate(&mut self, host: HostNumber, on: bool) {
        let machine = &mut self.hosts[host].machine;
        machine.is_drained = on;
        let stored = machine.stored();
        self.input(host, Input::Drain { on, stored, vms: true });
    }

    pub(crate) fn plan_crash(&mut self, host: HostNumber) {
        if let Some(wait) = self.wait_for(self.scenario.faults.crashes) {
            self.agenda.enter(self.now + wait, Event::Crash(host));
        }
    }

    pub(crate) fn plan_cut(&mut self, host: HostNumber) {
        if let Some(wait) = self.wait_for(self.scenario.faults.cuts) {
            self.agenda.enter(self.now + wait, Event::Cut(host));
        }
    }

    /// Draws the time to the next of events that come so often in an hour.
    fn wait_for(&mut self, per_hour: f64) -> Option<Duration> {
        if per_hour <= 0.0 {
            return None;
        }
        let hours = -(1.0 - self.rng.random::<f64>()).ln() / per_hour;
        Some(Duration::from_secs_f64((hours * HOUR_S).min(1e9)))
    }

    /// Kills an agent. The processes of its volumes go on.
    pub(crate) fn crash(&mut self, host: HostNumber) {
        if self.scenario.faults.crashes <= 0.0 || self.hosts[host].agent.is_none() {
            return;
        }
        self.counts.crashes += 1;
        self.settle_jobs_of_dead(host);
        self.cancel_moves_of_dead(host);
        let at = &mut self.hosts[host];
        at.note(self.now, "its agent crashes".to_owned());
        at.agent = None;
        at.store_at_crash = at.machine.stored_by_lease();
        self.touch(host);
        let outage = self.time_up_to(self.scenario.faults.longest, LEAST_OUTAGE);
        self.agenda.enter(self.now + outage, Event::Restart(host));
    }

    pub(crate) fn restart(&mut self, host: HostNumber) {
        let at = &mut self.hosts[host];
        at.note(self.now, "its next agent starts".to_owned());
        if at.machine.stored_by_lease() != at.store_at_crash {
            let name = at.name.clone();
            self.violate(Rule::Ghost { host: name, what: "its store has changed" }, &[host]);
        }
        self.start(host);
        self.plan_crash(host);
    }

    pub(crate) fn cut(&mut self, host: HostNumber) {
        if self.scenario.faults.cuts <= 0.0 {
            return;
        }
        self.counts.cuts += 1;
        self.hosts[host].is_cut = true;
        self.hosts[host].note(self.now, "the network cuts it off".to_owned());
        let outage = self.time_up_to(self.scenario.faults.longest, LEAST_OUTAGE);
        self.agenda.enter(self.now + outage, Event::Heal(host));
    }

    pub(crate) fn heal(&mut self, host: HostNumber) {
        self.hosts[host].is_cut = false;
        self.hosts[host].note(self.now, "the network reaches it again".to_owned());
        self.plan_cut(host);
    }
}

/// Returns the URIs of a lease of this host, which nothing reads.
pub(super) fn uris(host: HostNumber) -> Vec<String> {
    vec![format!("nbd://{host}")]
}
