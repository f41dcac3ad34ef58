//! The rules that hold after each event, and the report of a violation.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use aquifer_control::ledger::Ledger;
use aquifer_control::node::Output;
use aquifer_control::{Action, LentLease, LentStatus, LoanState, Role};
use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId};

use crate::event::HostNumber;
use crate::host::Host;
use crate::machine::{Stored, Volume};
use crate::simulation::Simulation;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages explain the fields")]
pub enum Rule {
    /// A page of a program is nowhere, or in two places.
    #[error("the programs of {host} have {demand}, but {found} of it is somewhere")]
    Astray { host: HostName, demand: Bytes, found: Bytes },
    /// Borrower and lender disagree on the pages in a lease.
    #[error("{borrower} has {placed} in lease {lease}, but {lender} stores {stored} in it")]
    Books { borrower: HostName, lender: HostName, lease: LeaseId, placed: Bytes, stored: Bytes },
    /// A lease or a volume holds more than its capacity.
    #[error("volume {volume} of {host} holds more than its capacity")]
    Overfull { host: HostName, volume: VolumeId },
    /// A lender frees a lease that its borrower still uses, before the grace is over.
    #[error("{lender} frees lease {lease}, in which {borrower} has {placed}")]
    FreedInUse { lender: HostName, borrower: HostName, lease: LeaseId, placed: Bytes },
    /// A lender grants more than it can spare.
    #[error("{lender} grants {granted}, but can spare {spare}")]
    Overgranted { lender: HostName, granted: Bytes, spare: Bytes },
    /// At a grant, a lender's memory is not enough for its use and its promises.
    #[error("{lender} uses {used} of {total} and has promised {promised} more")]
    Overpromised { lender: HostName, used: Bytes, promised: Bytes, total: Bytes },
    /// A host has more in RAM than it has RAM.
    #[error("{host} has {used} in {total} of RAM")]
    MoreThanRam { host: HostName, used: Bytes, total: Bytes },
    /// Fig. 3 has no such edge.
    #[error("{host} was {from}, and is {to} now")]
    NoEdge { host: HostName, from: Role, to: Role },
    /// A host borrows and lends at the same time.
    #[error("{host} has {volumes} volume(s) and {leases} lease(s)")]
    BothRoles { host: HostName, volumes: usize, leases: usize },
    /// A lender gave two leases for one request.
    #[error("{lender} has two leases for one request")]
    TwoLeases { lender: HostName },
    /// A host uses a lease that its lender's record does not let it use.
    #[error("{host} uses lease {lease} of {lender}, which does not know that it may")]
    Stranger { host: HostName, lender: HostName, lease: LeaseId },
    /// A VM runs on two hosts, or on none.
    #[error("{vm} is on {places} hosts")]
    Places { vm: RegionName, places: usize },
    /// A page of a VM is nowhere, or in two places.
    #[error("{vm} on {host} uses {wanted}, but {found} of it is somewhere")]
    VmAstray { vm: RegionName, host: HostName, wanted: Bytes, found: Bytes },
    /// The cache of a VM holds more than it may.
    #[error("{vm} has {resident} in a cache of {cache} on {host}")]
    VmOverfull { vm: RegionName, host: HostName, resident: Bytes, cache: Bytes },
    /// A host promises more to its VMs and borrowers than it has.
    #[error("{host} promises {promised} of {total} to VMs and borrowers")]
    Overcommitted { host: HostName, promised: Bytes, total: Bytes },
    /// A host takes a VM for which its ledger has no room.
    #[error(
        "{host} takes {vm}, whose cache may take {cache}: {left} are left, with {headroom} kept"
    )]
    Overfilled { host: HostName, vm: RegionName, cache: Bytes, left: Bytes, headroom: Bytes },
    /// Overload moves a VM again too soon.
    #[error("overload moves {vm} again after {:.0} s, to {host}", apart.as_secs_f64())]
    Oscillates { vm: RegionName, host: HostName, apart: Duration },
    /// A host without an agent acts.
    #[error("the agent of {host} is down, but {what}")]
    Ghost { host: HostName, what: &'static str },
}

/// A violation, with what led to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The seed of the run.
    pub seed: u64,
    /// The time of the event that broke the rule.
    pub at: Duration,
    /// The rule.
    pub rule: Rule,
    /// The hosts concerned, each with its latest events.
    pub hosts: Vec<(HostName, Vec<(Duration, String)>)>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, {:.3} s: {}", self.seed, self.at.as_secs_f64(), self.rule)?;
        for (host, events) in &self.hosts {
            write!(f, "\n{host}:")?;
            for (at, what) in events {
                write!(f, "\n  {:.3} s: {what}", at.as_secs_f64())?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Violation {}

impl Simulation {
    /// Records a broken rule, if it is the first.
    pub(crate) fn violate(&mut self, rule: Rule, hosts: &[HostNumber]) {
        if self.violation.is_none() {
            let latest =
                |host: &HostNumber| (self.hosts[*host].name.clone(), self.hosts[*host].latest());
            let hosts = hosts.iter().map(latest).collect();
            let (seed, at) = (self.scenario.seed, self.now);
            self.violation = Some(Box::new(Violation { seed, at, rule, hosts }));
        }
    }

    /// Checks the state of one host.
    pub(crate) fn check(&mut self, host: HostNumber) {
        let broken = self.check_pages(host);
        let broken = broken.or_else(|| self.check_vms(host));
        let broken = broken.or_else(|| self.check_volumes(host)).or_else(|| self.check_store(host));
        if let Some((rule, other)) = broken {
            let concerned: BTreeSet<_> = [host, other].into();
            self.violate(rule, &concerned.into_iter().collect::<Vec<_>>());
        }
    }

    fn check_pages(&self, host: HostNumber) -> Option<(Rule, HostNumber)> {
        let machine = &self.hosts[host].machine;
        let name = || self.hosts[host].name.clone();
        let (demand, total, used) = (machine.demand, machine.total, machine.used());
        let found = machine.resident + machine.disk + machine.swapped();
        let volumes = machine.volumes.values().filter(|volume| volume.is_swap()).count();
        let leases = machine.store.values().filter(|kept| kept.lent.makes_lender()).count();
        let rule = if found != demand {
            Rule::Astray { host: name(), demand, found }
        } else if used > total {
            Rule::MoreThanRam { host: name(), used, total }
        } else if volumes > 0 && leases > 0 {
            Rule::BothRoles { host: name(), volumes, leases }
        } else {
            return None;
        };
        Some((rule, host))
    }

    /// Checks that each VM is on one host.
    pub(crate) fn check_places_of_vms(&mut self, touched: &[HostNumber]) {
        let mut changed = Vec::new();
        for &host in touched {
            changed.extend(self.tally.fleet.take(host, &self.hosts[host].machine));
        }
        if let Some((vm, places)) = self.tally.fleet.astray(&changed) {
            self.violate(Rule::Places { vm, places }, touched);
        }
    }

    /// Checks that a promise to a VM that comes is within the ledger, and below this share of M_t.
    pub(crate) fn check_promise(
        &mut self,
        host: HostNumber,
        vm: RegionName,
        (cache, share): (Bytes, f64),
        before: &Ledger,
    ) {
        let Some(agent) = &self.hosts[host].agent else { return };
        let (after, left) = (agent.node.ledger(), agent.node.controller().left());
        let headroom = after.total.saturating_sub(after.total.scaled(share));
        if after.broken() > before.broken() || left < headroom {
            let host_name = self.hosts[host].name.clone();
            let rule = Rule::Overfilled { host: host_name, vm, cache, left, headroom };
            self.violate(rule, &[host]);
        }
    }

    fn check_vms(&self, host: HostNumber) -> Option<(Rule, HostNumber)> {
        let Host { name, machine, .. } = &self.hosts[host];
        for vm in machine.vms.values() {
            let volume = vm.volume.and_then(|volume| machine.volumes.get(&volume));
            let found = vm.resident + vm.outside + volume.map_or(Bytes::ZERO, Volume::used);
            let (wanted, resident, cache) = (vm.wanted, vm.resident, vm.spec.cache);
            let (vm, host_name) = (vm.spec.name.clone(), name.clone());
            if found != wanted {
                return Some((Rule::VmAstray { vm, host: host_name, wanted, found }, host));
            }
            if resident > cache {
                return Some((Rule::VmOverfull { vm, host: host_name, resident, cache }, host));
            }
        }
        // Second copies that go first break no promise.
        let lent = machine.store.values().filter(|kept| !kept.lent.goes_first);
        let lent: Bytes = lent.map(|kept| kept.lent.bytes).sum();
        let (promised, total) = (machine.promised_to_vms() + lent, machine.total);
        let rule = Rule::Overcommitted { host: name.clone(), promised, total };
        (promised > total).then_some((rule, host))
    }

    /// Compares this borrower's book with those of its lenders.
    fn check_volumes(&self, borrower: HostNumber) -> Option<(Rule, HostNumber)> {
        for (&volume, held) in &self.hosts[borrower].machine.volumes {
            let mut places = held.places.values();
            if held.used() > held.bytes || places.any(|place| place.placed > place.borrowed.bytes) {
                let host = self.hosts[borrower].name.clone();
                return Some((Rule::Overfull { host, volume }, borrower));
            }
            for (&lease, place) in &held.places {
                let lender = &self.hosts[place.lender];
                let kept = lender.machine.store.get(&lease);
                let host = &self.hosts[borrower].name;
                if kept.is_some_and(|it| it.lent.borrower != *host && !it.lent.next.contains(host))
                {
                    let (host, lender) = (host.clone(), lender.name.clone());
                    return Some((Rule::Stranger { host, lender, lease }, place.lender));
                }
                let stored = kept.map_or(Bytes::ZERO, |kept| kept.stored);
                if stored != place.placed {
                    let rule = self.books(borrower, place.lender, lease, place.placed, stored);
                    return Some((rule, place.lender));
                }
            }
        }
        None
    }

    /// Compares this lender's book with those of its borrowers.
    fn check_store(&self, lender: HostNumber) -> Option<(Rule, HostNumber)> {
        let store = &self.hosts[lender].machine.store;
        for (&lease, kept) in store {
            let placed = kept.users.iter().map(|user| self.placed(*user, lease)).sum();
            if placed != kept.stored {
                let borrower = self.names[&kept.lent.borrower];
                let rule = self.books(borrower, lender, lease, placed, kept.stored);
                return Some((rule, borrower));
            }
        }
        None
    }

    /// Checks that a lender that opens a lease has none for the same request.
    pub(crate) fn check_request(&mut self, lender: HostNumber, new: &LentLease) {
        let store = &self.hosts[lender].machine.store;
        let is_same = |kept: &Stored| {
            (kept.lent.request, &kept.lent.borrower) == (new.request, &new.borrower)
        };
        if store.iter().any(|(lease, kept)| *lease != new.lease && is_same(kept)) {
            let name = self.hosts[lender].name.clone();
            self.violate(Rule::TwoLeases { lender: name }, &[lender]);
        }
    }

    fn books(
        &self,
        borrower: HostNumber,
        lender: HostNumber,
        lease: LeaseId,
        placed: Bytes,
        stored: Bytes,
    ) -> Rule {
        let name = |host: HostNumber| self.hosts[host].name.clone();
        Rule::Books { borrower: name(borrower), lender: name(lender), lease, placed, stored }
    }

    /// Returns the bytes that a borrower has in a lease.
    pub(crate) fn placed(&self, borrower: HostNumber, lease: LeaseId) -> Bytes {
        let mut volumes = self.hosts[borrower].machine.volumes.values();
        let place = volumes.find_map(|volume| volume.places.get(&lease));
        place.map_or(Bytes::ZERO, |place| place.placed)
    }

    /// Checks the grants among a node's outputs. `spare` is what the node could spare before.
    pub(crate) fn check_grants(&mut self, lender: HostNumber, spare: Bytes, outputs: &[Output]) {
        let opened = outputs.iter().filter_map(|output| match output {
            Output::Begin(_, Action::OpenLease(lease)) => Some(lease),
            _ => None,
        });
        let granted: Bytes = opened.clone().map(|lease| lease.bytes).sum();
        let counts_copies = opened.clone().any(|lease| lease.goes_first);
        let Some(agent) = self.hosts[lender].agent.as_ref().filter(|_| granted > Bytes::ZERO)
        else {
            return;
        };
        let (name, controller) = (self.hosts[lender].name.clone(), agent.node.controller());
        let memory = controller.memory();
        let lent = controller.lent().into_iter().filter(|loan| loan.state != LoanState::Freeing);
        let unused = |loan: &LentStatus| loan.lease.bytes.saturating_sub(loan.stored);
        // Second copies that go first make room for others.
        let (first, lent): (Vec<_>, Vec<_>) =
            lent.partition(|loan| loan.lease.goes_first && !counts_copies);
        let promised: Bytes = lent.iter().map(unused).sum();
        let copies: Bytes = first.iter().map(|loan| loan.stored).sum();
        let used = memory.used.saturating_sub(copies);
        let total = memory.upper(&self.scenario.config);
        if granted > spare {
            self.violate(Rule::Overgranted { lender: name, granted, spare }, &[lender]);
        } else if used + promised > total {
            self.violate(Rule::Overpromised { lender: name, used, promised, total }, &[lender]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aquifer_control::Role;

    use super::*;
    use crate::{Load, Scenario};

    const MEMORY: Bytes = Bytes::gib(4);

    /// Returns a simulation in which host `a` has pages in a lease of `b`.
    fn borrowing() -> Simulation {
        let host = |(name, share): (&str, f64)| {
            (name.parse().unwrap(), Load::constant(MEMORY.scaled(share)))
        };
        let hosts = [("a", 1.1), ("b", 0.1)].map(host).into();
        let scenario = Scenario::new(hosts, MEMORY, Duration::from_secs(60), 1);
        let mut simulation = Simulation::new(scenario);
        simulation.run_for(Duration::from_secs(20)).unwrap();
        assert_eq!(simulation.role(1), Role::Lender);
        simulation
    }

    /// Breaks something, and returns the violation that the next seconds find.
    fn broken(breaks: impl FnOnce(&mut Simulation)) -> Rule {
        let mut simulation = borrowing();
        breaks(&mut simulation);
        let violation = simulation.run_for(Duration::from_secs(5)).unwrap_err();
        assert!(violation.to_string().contains("seed 1, 2"), "{violation}");
        violation.rule
    }

    fn lease(simulation: &Simulation) -> LeaseId {
        *simulation.hosts[1].machine.store.keys().next().unwrap()
    }

    #[test]
    fn a_page_that_vanishes_is_found() {
        let rule = broken(|simulation| {
            let resident = &mut simulation.hosts[0].machine.resident;
            *resident = *resident - Bytes(4096);
        });
        assert!(matches!(rule, Rule::Astray { .. }), "{rule}");
    }

    #[test]
    fn a_page_that_its_lender_lost_is_found() {
        let rule = broken(|simulation| {
            let lease = lease(simulation);
            let kept = simulation.hosts[1].machine.store.get_mut(&lease).unwrap();
            kept.stored = kept.stored - Bytes(4096);
        });
        assert!(matches!(rule, Rule::Books { .. }), "{rule}");
    }

    #[test]
    fn a_lease_that_is_freed_in_use_is_found() {
        let rule = broken(|simulation| {
            let lease = lease(simulation);
            let from = simulation.hosts[0].name.clone();
            let message = aquifer_control::Message::MemBorFin { lease, generation: 0 };
            let ticket = aquifer_control::node::Ticket(u64::MAX);
            let fin = aquifer_control::node::Input::Heard { from, message, ticket };
            simulation.input(1, fin);
        });
        assert!(matches!(rule, Rule::FreedInUse { .. }), "{rule}");
    }

    #[test]
    fn a_grant_beyond_the_spare_memory_is_found() {
        let mut simulation = borrowing();
        let lease = simulation.hosts[1].machine.store.values().next().unwrap().lent.clone();
        let work = aquifer_control::node::Work::Lease(lease.lease);
        let grant = Output::Begin(work, Action::OpenLease(lease));
        simulation.check_grants(1, Bytes::mib(64), &[grant]);
        let rule = simulation.violation.unwrap().rule;
        assert!(matches!(rule, Rule::Overgranted { .. }), "{rule}");
    }

    #[test]
    fn a_step_from_lender_to_borrower_is_found() {
        let rule = broken(|simulation| {
            simulation.hosts[1].role = Role::Borrower;
            simulation.set_load(0, Load::constant(Bytes::ZERO));
        });
        assert!(matches!(rule, Rule::NoEdge { from: Role::Lender, .. }), "{rule}");
    }

    /// Returns a simulation of two hosts, of which `a` has a VM in borrowed memory of `b`.
    fn with_vm() -> Simulation {
        let hosts = ["a", "b"].map(|name| (name.parse().unwrap(), Load::constant(Bytes::gib(1))));
        let scenario = Scenario::new(hosts.into(), MEMORY, Duration::from_secs(60), 1);
        let (size, load) = (Bytes::gib(1), Load::constant(Bytes::mib(768)));
        let (cache, backing) = (Bytes::mib(512), crate::Backing::Borrowed);
        let name = "vm".parse().unwrap();
        let vm = crate::VmSpec { name, size, cache, backing, load, dirty: 1.0 };
        let mut simulation = Simulation::new(Scenario { vms: vec![vec![vm]], ..scenario });
        simulation.run_for(Duration::from_secs(20)).unwrap();
        assert_eq!(simulation.vms(0).len(), 1);
        simulation
    }

    /// Breaks something about the VM, and returns the violation that the next seconds find.
    fn broken_vm(breaks: impl FnOnce(&mut Simulation)) -> Rule {
        let mut simulation = with_vm();
        breaks(&mut simulation);
        simulation.run_for(Duration::from_secs(5)).unwrap_err().rule
    }

    #[test]
    fn a_vm_on_two_hosts_is_found() {
        let rule = broken_vm(|simulation| {
            let vms = simulation.hosts[0].machine.vms.clone();
            simulation.hosts[1].machine.vms = vms;
        });
        assert!(matches!(rule, Rule::Places { places: 2, .. }), "{rule}");
    }

    #[test]
    fn a_vm_that_is_lost_is_found() {
        let rule = broken_vm(|simulation| simulation.hosts[0].machine.vms.clear());
        assert!(matches!(rule, Rule::Places { places: 0, .. }), "{rule}");
    }

    #[test]
    fn a_page_of_a_vm_that_vanishes_is_found() {
        let rule = broken_vm(|simulation| {
            let vm = simulation.hosts[0].machine.vms.values_mut().next().unwrap();
            vm.resident = vm.resident - Bytes(4096);
        });
        assert!(matches!(rule, Rule::VmAstray { .. }), "{rule}");
    }

    #[test]
    fn a_promise_that_exceeds_the_ram_is_found() {
        let rule = broken_vm(|simulation| {
            let vm = simulation.hosts[0].machine.vms.values_mut().next().unwrap();
            vm.spec.cache = MEMORY + Bytes(4096);
        });
        assert!(matches!(rule, Rule::Overcommitted { .. }), "{rule}");
    }

    #[test]
    fn a_lease_that_its_lender_gave_another_host_is_found() {
        let rule = broken_vm(|simulation| {
            let name = simulation.hosts[1].name.clone();
            simulation.hosts[1].machine.store.values_mut().next().unwrap().lent.borrower = name;
        });
        assert!(matches!(rule, Rule::Stranger { .. }), "{rule}");
    }

    #[test]
    fn a_second_move_within_ten_minutes_is_found() {
        let mut simulation = with_vm();
        let vm = "vm".parse().unwrap();
        let last = Some(simulation.now);
        simulation.now += Duration::from_secs(599);
        simulation.count_move(1, &vm, crate::machine::Reason::Overload, last);
        let rule = simulation.violation.unwrap().rule;
        assert!(matches!(rule, Rule::Oscillates { .. }), "{rule}");
    }

    #[test]
    fn a_vm_for_which_no_room_is_left_is_found() {
        let mut simulation = with_vm();
        let before = simulation.hosts[1].agent.as_ref().unwrap().node.ledger();
        simulation.check_promise(1, "vm".parse().unwrap(), (Bytes::gib(1), 0.8), &before);
        assert_eq!(simulation.violation, None);
        simulation.check_promise(1, "vm".parse().unwrap(), (Bytes::gib(1), 0.2), &before);
        let rule = simulation.violation.unwrap().rule;
        assert!(matches!(rule, Rule::Overfilled { .. }), "{rule}");
    }

    #[test]
    fn a_store_that_changes_without_an_agent_is_found() {
        let rule = broken(|simulation| {
            simulation.scenario.faults.crashes = 1.0;
            simulation.scenario.faults.longest = Duration::from_secs(1);
            simulation.crash(1);
            simulation.hosts[1].store_at_crash.clear();
        });
        assert!(matches!(rule, Rule::Ghost { .. }), "{rule}");
    }
}
