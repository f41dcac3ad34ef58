//! The inputs and outputs of nodes.

use std::collections::BTreeSet;

use aquifer_control::node::{Answer, EventKind, Health, Input, Notice, Output, Ticket, Work};
use aquifer_control::{Action, BorrowedLease, LentLease, Message, Owner};
use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};

use super::CallKind;
use super::offers::Slot;
use crate::event::{Ask, HostNumber, Reply};
use crate::host::Host;
use crate::invariants::Rule;
use crate::machine::Place;
use crate::simulation::Simulation;

impl Simulation {
    /// Passes one input to a node, checks its outputs, and performs them.
    pub(crate) fn input(&mut self, host: HostNumber, input: Input) {
        let Some(agent) = self.hosts[host].agent.as_mut() else {
            let name = self.hosts[host].name.clone();
            return self.violate(Rule::Ghost { host: name, what: "gets an input" }, &[host]);
        };
        // Only a request can lead to a grant.
        let spare = match &input {
            Input::Heard { message: Message::MemBorReq { goes_first: true, .. }, .. } => {
                agent.node.controller().spare_for_copies()
            }
            Input::Heard { message: Message::MemBorReq { owner: Owner::Swap, .. }, .. } => {
                agent.node.controller().spare()
            }
            Input::Heard { message: Message::MemBorReq { .. }, .. } => {
                agent.node.controller().spare_for_regions()
            }
            _ => Bytes::ZERO,
        };
        let outputs = agent.node.handle(self.now - agent.born, input);
        self.check_grants(host, spare, &outputs);
        for output in outputs {
            self.perform(host, output);
        }
        self.touch(host);
    }

    fn perform(&mut self, host: HostNumber, output: Output) {
        match output {
            Output::Begin(work, action) => self.begin_action(host, work, action),
            Output::AskOffers => self.sample(host, Slot::Leases),
            Output::Renew { only } => self.renew(host, only.as_ref()),
            Output::LookAtVolumes => self.look_at_volumes(host),
            Output::Answer(ticket, answer) => self.answer(host, ticket, answer),
            Output::Decision { what, .. } => self.hosts[host].note(self.now, what),
            Output::RoleChanged { from, to } => {
                let is_continuous = self.hosts[host].role == from;
                if !self.hosts[host].change_role(self.now, to) || !is_continuous {
                    let name = self.hosts[host].name.clone();
                    self.violate(Rule::NoEdge { host: name, from, to }, &[host]);
                }
            }
            Output::Notice(Notice { kind, what, .. }) => {
                self.counts.expired += u64::from(kind == EventKind::BorrowerLost);
                self.hosts[host].note(self.now, what);
            }
            Output::Warning(what) => self.hosts[host].note(self.now, what),
            // No region of a simulated host has a cache whose size the node chooses.
            Output::SetCache { .. } => {}
            Output::LookAtVms => self.look_at_vms(host),
            Output::MoveVm { vm, avoid, below } => self.move_vm(host, &vm, avoid.as_ref(), below),
            Output::CancelMove => self.cancel_move(host),
            Output::SetSwapGate => {}
        }
    }

    fn begin_action(&mut self, host: HostNumber, work: Work, action: Action) {
        match action {
            Action::Send { to, message } => {
                if let Message::MemLenFin { lease, .. } = message {
                    self.note_recall(host, lease);
                }
                let to = self.names[&to];
                self.call(host, to, CallKind::Say(message.clone()), Ask::Say(message));
            }
            action => self.begin_job(host, work, action),
        }
    }

    fn note_recall(&mut self, host: HostNumber, lease: LeaseId) {
        if let Some(kept) = self.hosts[host].machine.store.get_mut(&lease) {
            self.counts.recalls += u64::from(!std::mem::replace(&mut kept.is_recalled, true));
        }
    }

    fn answer(&mut self, host: HostNumber, ticket: Ticket, answer: Answer) {
        let Some(agent) = self.hosts[host].agent.as_mut() else { return };
        if let Some(asked) = agent.arrivals.remove(&ticket) {
            self.answer_to_arrival(host, asked, answer);
        } else if agent.starting.remove(&ticket).is_some() {
            self.answer_to_start(host, &answer);
        } else if let Some((caller, call)) = agent.tickets.remove(&ticket) {
            self.reply(host, caller, call, answer);
        }
    }

    fn look_at_vms(&mut self, host: HostNumber) {
        let name = |host: HostNumber| self.hosts[host].name.clone();
        let readings = self.hosts[host].machine.vm_readings(self.now, name);
        self.input(host, Input::Vms(readings));
    }

    fn reply(&mut self, host: HostNumber, caller: HostNumber, call: super::CallId, answer: Answer) {
        let reply = match answer {
            Answer::Heard(failed) => Reply::Taken(failed),
            Answer::NoPeer => Reply::NoPeer,
            Answer::Renewed(lost) => Reply::Renewed(lost),
            Answer::Permitted => Reply::Done,
            Answer::Failed(problem) => Reply::Refused(problem.error),
            // Answers to operators, which no call awaits.
            _ => return,
        };
        self.answer_call(host, caller, call, reply);
    }

    /// Tells lenders that this host's volumes need their leases.
    fn renew(&mut self, host: HostNumber, only: Option<&BTreeSet<HostName>>) {
        let Host { machine, agent, .. } = &self.hosts[host];
        let is_known = |id: &VolumeId| agent.as_ref().is_some_and(|a| a.known.regions.contains(id));
        let known = machine.volumes.iter().filter(|(id, v)| v.is_swap() || is_known(id));
        let places = known.flat_map(|(_, volume)| {
            volume.places.values().chain(volume.copies.values().map(|(_, copy)| copy))
        });
        let meant =
            places.filter(|place| only.is_none_or(|only| only.contains(&place.borrowed.lender)));
        let mut leases = std::collections::BTreeMap::<_, Vec<_>>::new();
        for place in meant {
            let BorrowedLease { lease, generation, .. } = place.borrowed;
            leases.entry(place.lender).or_default().push((lease, generation));
        }
        for (lender, leases) in leases {
            self.call(host, lender, CallKind::Renew, Ask::Renew(leases));
        }
    }

    fn look_at_volumes(&mut self, host: HostNumber) {
        let health = |place: &Place| {
            let lender = &self.hosts[place.lender];
            if self.is_cut_off(host, place.lender) || lender.agent.is_none() {
                Health::Unreachable
            } else if lender.machine.store.contains_key(&place.borrowed.lease) {
                Health::Ok
            } else {
                Health::Lost
            }
        };
        let volumes = self.hosts[host].machine.volumes_here();
        let readings = volumes.map(|(id, volume)| volume.reading(id, health)).collect();
        self.input(host, Input::Volumes(readings));
    }

    /// Returns whether the network does not carry packets between two hosts.
    pub(crate) fn is_cut_off(&self, one: HostNumber, other: HostNumber) -> bool {
        one != other && (self.hosts[one].is_cut || self.hosts[other].is_cut)
    }

    /// Returns the leases of this host's volumes that answer.
    pub(crate) fn reached(&self, host: HostNumber) -> BTreeSet<LeaseId> {
        let places = self.hosts[host].machine.volumes.values().flat_map(|v| v.places.values());
        let reached = places.filter(|place| self.reaches(host, place.lender, place.borrowed.lease));
        reached.map(|place| place.borrowed.lease).collect()
    }

    /// Returns whether a volume on this host reaches a lease. The lender's agent serves it.
    pub(crate) fn reaches(&self, host: HostNumber, lender: HostNumber, lease: LeaseId) -> bool {
        let at = &self.hosts[lender];
        at.agent.is_some()
            && !self.is_cut_off(host, lender)
            && at.machine.store.contains_key(&lease)
    }

    /// Enters postings into the books of lenders.
    pub(crate) fn post(&mut self, borrower: HostNumber, postings: Vec<crate::machine::Posting>) {
        self.touch(borrower);
        for posting in postings {
            self.touch(posting.lender);
            // `check` finds the difference between the books if the lender cannot book it.
            let _ = self.hosts[posting.lender].machine.post(posting);
        }
    }

    /// Returns the hosts that may use a lease.
    pub(crate) fn users(&self, lent: &LentLease) -> Vec<HostNumber> {
        std::iter::once(&lent.borrower).chain(&lent.next).map(|host| self.names[host]).collect()
    }

    /// Returns whether a volume on this host has a lease.
    pub(crate) fn holds(&self, host: HostNumber, lease: LeaseId) -> bool {
        let mut volumes = self.hosts[host].machine.volumes.values();
        volumes.any(|volume| volume.has(lease))
    }
}
