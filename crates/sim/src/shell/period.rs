//! Monitoring periods: the kernel's work, and the readings of the agent.

use aquifer_control::node::{Found, Input, Readings};
use aquifer_page::{LeaseId, VolumeId};

use crate::event::{Event, HostNumber};
use crate::simulation::Simulation;

impl Simulation {
    pub(crate) fn period(&mut self, host: HostNumber) {
        self.agenda.enter(self.now + self.scenario.period, Event::Period(host));
        self.settle(host);
        self.note_connections(host);
        if let Some(readings) = self.read(host) {
            if let Some(found) = &readings.found {
                self.note_found(host, found);
            }
            self.input(host, Input::Period(readings));
            if let Some(agent) = &mut self.hosts[host].agent {
                agent.known.regions.retain(|volume| agent.node.holds(*volume));
            }
            self.start_vms(host);
        }
        if let Some(agent) = &self.hosts[host].agent
            && !self.hosts[host].is_cut
        {
            self.board.tell(host, agent.node.controller().spare(), self.now);
        }
    }

    /// Brings a host's memory up to date.
    pub(crate) fn settle(&mut self, host: HostNumber) {
        let reached = self.reached(host);
        let machine = &mut self.hosts[host].machine;
        let postings = machine.settle(self.now, &reached, &self.scenario.costs);
        self.post(host, postings);
    }

    /// Notes the leases that a volume of their borrower is connected to, and for how long volumes
    /// of the others have not reached them.
    fn note_connections(&mut self, host: HostNumber) {
        for lease in self.connected(host) {
            if let Some(kept) = self.hosts[host].machine.store.get_mut(&lease) {
                kept.connected = self.now;
            }
        }
        let store = &self.hosts[host].machine.store;
        let is_in_use = |lease: &LeaseId| {
            let mut users = store[lease].users.iter();
            users.any(|user| self.holds(*user, *lease))
        };
        let used = store.iter().filter(|(lease, _)| is_in_use(lease));
        let apart = used.map(|(_, kept)| (self.now - kept.connected).as_secs()).max();
        let longest = &mut self.counts.longest_apart_s;
        *longest = apart.unwrap_or_default().max(*longest);
    }

    fn connected(&self, lender: HostNumber) -> Vec<LeaseId> {
        let store = &self.hosts[lender].machine.store;
        let is_connected = |lease: &LeaseId| {
            let mut users = store[lease].users.iter();
            users.any(|user| self.reaches(*user, lender, *lease) && self.holds(*user, *lease))
        };
        store.keys().copied().filter(is_connected).collect()
    }

    /// Takes the readings of one period, if there is an agent.
    fn read(&self, host: HostNumber) -> Option<Readings> {
        let (agent, machine) = (self.hosts[host].agent.as_ref()?, &self.hosts[host].machine);
        let wanted = agent.node.wanted(self.now - agent.born);
        let has_left = |(volume, lease): &(VolumeId, LeaseId)| {
            let volume = machine.volumes.get(volume);
            volume.is_some_and(|volume| !volume.has(*lease))
        };
        let found = wanted.vacated.map(|vacated| Found {
            vacated: vacated.into_iter().filter(has_left).map(|(_, lease)| lease).collect(),
            dead: self.dead(host),
            gone: self.gone(host),
            moved: self.moved(host),
            arrived: self.arrived(host),
            missed: self.missed(host),
        });
        Some(Readings {
            memory: machine.reading(),
            own: machine.own(),
            stored: machine.stored_by_lease(),
            connected: wanted.connected.then(|| self.connected(host)),
            found,
            own_keys: machine.leases_with_keys(),
            ..Readings::default()
        })
    }

    /// Returns the volumes for swap that the agent has found or made and that have ended.
    fn dead(&self, host: HostNumber) -> Vec<VolumeId> {
        let Some(agent) = &self.hosts[host].agent else { return Vec::new() };
        let volumes = &self.hosts[host].machine.volumes;
        agent.known.swap.iter().copied().filter(|volume| !volumes.contains_key(volume)).collect()
    }
}
