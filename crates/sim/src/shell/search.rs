//! The search of an agent for a host that takes a VM.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use aquifer_control::node::{MoveEnd, Threshold};
use aquifer_page::{Bytes, HostName, LeaseId, RegionName};

use super::CallKind;
use super::offers::{Sampling, Slot};
use crate::event::{Arrive, Ask, HostNumber, MoveId, Reply};
use crate::machine::Standing;
use crate::simulation::Simulation;

/// An agent's search for a host for a VM.
#[derive(Debug)]
pub(super) struct Search {
    arrive: Arrive,
    /// The hosts that do not take it, and those that must not.
    refused: BTreeSet<HostNumber>,
    pub(super) sampling: Option<Sampling>,
    /// The hosts with room for it. The next one is the last.
    fitting: Vec<HostNumber>,
    /// The host that is asked.
    asked: Option<HostNumber>,
    /// The leases that this host may not use yet, each with its lender and generation.
    permits: Vec<(HostNumber, LeaseId, u32)>,
    is_cancelled: bool,
}

impl Search {
    pub(super) fn cache(&self) -> Bytes {
        self.arrive.cache
    }

    pub(super) fn below(&self) -> Threshold {
        self.arrive.below
    }

    pub(super) fn excepted(&self) -> &BTreeSet<HostNumber> {
        &self.refused
    }
}

impl Simulation {
    /// Begins to move a VM, as its node orders.
    pub(super) fn move_vm(
        &mut self,
        host: HostNumber,
        vm: &RegionName,
        avoid: Option<&HostName>,
        below: Threshold,
    ) {
        let id = MoveId(self.number());
        let Some(arrive) = self.offer_of(host, vm, id, below) else {
            let why = "its record does not let it move".to_owned();
            return self.tell_end(host, vm.clone(), MoveEnd::Refused { why });
        };
        let volume = arrive.memory.as_ref().map(|(volume, _)| volume);
        let volume = volume.and_then(|volume| self.hosts[host].machine.volumes.get(volume));
        // A host cannot lend to itself.
        let lenders = volume.iter().flat_map(|volume| volume.places.values());
        let lenders = lenders.map(|place| place.lender);
        let avoid = avoid.iter().map(|avoid| self.names[*avoid]);
        let refused = avoid.chain(lenders).collect();
        let Some(agent) = &mut self.hosts[host].agent else { return };
        agent.search = Some(Search {
            arrive,
            refused,
            sampling: None,
            fitting: Vec::new(),
            asked: None,
            permits: Vec::new(),
            is_cancelled: false,
        });
        self.sample(host, Slot::Rooms);
    }

    fn offer_of(
        &self,
        host: HostNumber,
        vm: &RegionName,
        id: MoveId,
        below: Threshold,
    ) -> Option<Arrive> {
        let machine = &self.hosts[host].machine;
        let it = machine.vms.get(vm).filter(|it| it.standing == Standing::Runs)?;
        let memory = machine.leases_of(it);
        let (size, cache) = (it.spec.size, it.spec.cache);
        Some(Arrive { id, vm: vm.clone(), size, cache, below, memory })
    }

    /// Cancels the move in progress, unless the VM is handed over.
    pub(super) fn cancel_move(&mut self, host: HostNumber) {
        let at = &mut self.hosts[host];
        if let Some(search) = at.agent.as_mut().and_then(|agent| agent.search.as_mut()) {
            search.is_cancelled = true;
        }
        at.machine.moving.leaving.values_mut().for_each(|leaving| leaving.is_cancelled = true);
    }

    fn search(&mut self, host: HostNumber) -> Option<&mut Search> {
        self.hosts[host].agent.as_mut()?.search.as_mut()
    }

    /// Takes hosts with their room, and asks the one with most.
    pub(super) fn found_rooms(&mut self, host: HostNumber, mut rooms: Vec<(HostNumber, Bytes)>) {
        rooms.sort_by_key(|(host, room)| (*room, Reverse(*host)));
        let Some(search) = self.search(host) else { return };
        rooms.retain(|(_, room)| *room >= search.cache());
        if rooms.is_empty() {
            let why = "no host has room".to_owned();
            return self.end_search(host, MoveEnd::Refused { why });
        }
        search.fitting = rooms.into_iter().map(|(host, _)| host).collect();
        self.ask_next(host);
    }

    fn ask_next(&mut self, host: HostNumber) {
        let Some(search) = self.search(host) else { return };
        search.asked = search.fitting.pop();
        let leases = search
            .arrive
            .memory
            .clone()
            .map_or_else(Vec::new, |(_, leases)| leases.into_iter().collect());
        if search.is_cancelled {
            return self.end_search(host, MoveEnd::Cancelled);
        }
        if search.asked.is_none() {
            return self.sample(host, Slot::Rooms);
        }
        let volumes = &self.hosts[host].machine.volumes;
        let lender = |lease| volumes.values().find_map(|v| Some(v.places.get(&lease)?.lender));
        let permits = leases
            .into_iter()
            .filter_map(|(lease, generation)| Some((lender(lease)?, lease, generation)));
        let permits: Vec<_> = permits.collect();
        if let Some(search) = self.search(host) {
            search.permits = permits;
        }
        self.go_on_asking(host);
    }

    /// Asks the next lender to let the host use its lease, or else the host.
    fn go_on_asking(&mut self, host: HostNumber) {
        let Some(search) = self.search(host) else { return };
        let Some(to) = search.asked else { return };
        match search.permits.pop() {
            Some((lender, ..)) if lender == to => {
                self.refused_by(host, "it lends some of the memory".to_owned());
            }
            Some((lender, lease, generation)) => {
                let ask = Ask::Permit { lease, generation, to };
                self.call(host, lender, CallKind::Permit, ask);
            }
            None => {
                let ask = Ask::Arrive(search.arrive.clone());
                self.call(host, to, CallKind::Arrive, ask);
            }
        }
    }

    fn refused_by(&mut self, host: HostNumber, why: String) {
        let asked = self.search(host).and_then(|search| search.asked.take());
        if let (Some(asked), Some(search)) = (asked, self.search(host)) {
            search.refused.insert(asked);
            let what = format!("{} takes no VM: {why}", self.hosts[asked].name);
            self.hosts[host].note(self.now, what);
        }
        self.ask_next(host);
    }

    /// Takes a lender's answer; `None` if it does not answer.
    pub(super) fn permitted(&mut self, host: HostNumber, reply: Option<Reply>) {
        match reply {
            Some(Reply::Done) => self.go_on_asking(host),
            Some(Reply::Refused(why)) => self.refused_by(host, why),
            _ => self.refused_by(host, "a lender does not answer".to_owned()),
        }
    }

    /// Takes the answer of a host that could take the VM; `None` if it does not answer.
    pub(super) fn asked_to_take(&mut self, host: HostNumber, reply: Option<Reply>) {
        match reply {
            Some(Reply::Done) => self.found(host),
            Some(Reply::Refused(why)) => self.refused_by(host, why),
            _ => {
                let why = "the host does not answer".to_owned();
                self.end_search(host, MoveEnd::Failed { to: None, why });
            }
        }
    }

    /// Ends the search, and moves the VM to the host that takes it.
    fn found(&mut self, host: HostNumber) {
        let search = self.hosts[host].agent.as_mut().and_then(|agent| agent.search.take());
        match search {
            Some(Search { is_cancelled: true, arrive, .. }) => {
                self.tell_end(host, arrive.vm, MoveEnd::Cancelled);
            }
            Some(Search { arrive, asked: Some(to), .. }) => self.begin_leaving(host, to, arrive),
            _ => {}
        }
    }

    fn end_search(&mut self, host: HostNumber, end: MoveEnd) {
        let search = self.hosts[host].agent.as_mut().and_then(|agent| agent.search.take());
        if let Some(search) = search {
            self.tell_end(host, search.arrive.vm, end);
        }
    }
}
