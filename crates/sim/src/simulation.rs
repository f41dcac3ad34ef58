//! The loop over the heap of events.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::Role;
use aquifer_page::{Bytes, HostName, RegionName};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::agenda::Agenda;
use crate::event::{Event, HostNumber};
use crate::host::Host;
use crate::machine::{Machine, Standing, Vm};
use crate::report::RoleChanges;
use crate::shell::Board;
use crate::tally::Tally;
use crate::{Counts, Load, Network, Report, Scenario, Violation, VmSpec};

/// A simulation in progress.
#[derive(Debug)]
pub struct Simulation {
    pub(crate) scenario: Scenario,
    pub(crate) now: Duration,
    pub(crate) rng: SmallRng,
    pub(crate) agenda: Agenda,
    pub(crate) hosts: Vec<Host>,
    pub(crate) names: BTreeMap<HostName, HostNumber>,
    pub(crate) board: Board,
    pub(crate) tally: Tally,
    pub(crate) counts: Counts,
    /// The last number of a call or job.
    pub(crate) numbers: u64,
    /// The hosts that the present event touches.
    pub(crate) touched: Vec<HostNumber>,
    pub(crate) violation: Option<Box<Violation>>,
}

impl Simulation {
    /// Returns a simulation at its start, with an agent on each host.
    pub fn new(mut scenario: Scenario) -> Self {
        let mut hosts: Vec<_> = std::mem::take(&mut scenario.hosts)
            .into_iter()
            .map(|(name, load)| Host::new(name, Machine::new(scenario.memory, load)))
            .collect();
        let vms = place(std::mem::take(&mut scenario.vms), &mut hosts);
        let mut simulation = Self {
            now: Duration::ZERO,
            rng: SmallRng::seed_from_u64(scenario.seed),
            agenda: Agenda::default(),
            names: hosts.iter().map(|host| host.name.clone()).zip(0..).collect(),
            board: Board::new(hosts.len()),
            tally: Tally::new(hosts.len(), vms),
            counts: Counts::default(),
            numbers: 0,
            touched: Vec::new(),
            violation: None,
            hosts,
            scenario,
        };
        simulation.begin();
        simulation
    }

    fn begin(&mut self) {
        for host in 0..self.hosts.len() {
            self.settle(host);
            self.start(host);
            let phase = self.scenario.period.mul_f64(self.rng.random());
            self.agenda.enter(phase, Event::Period(host));
            self.plan_crash(host);
            self.plan_cut(host);
            self.plan_drain(host);
        }
        for (number, order) in self.scenario.orders.iter().enumerate() {
            self.agenda.enter(order.at, Event::Order(number));
        }
        self.check_touched();
    }

    /// Runs the whole scenario.
    ///
    /// # Errors
    /// At the first violation.
    pub fn run(mut self) -> Result<Report, Box<Violation>> {
        self.run_for(self.scenario.duration)?;
        Ok(self.report())
    }

    /// Runs on for this time.
    ///
    /// # Errors
    /// At the first violation.
    pub fn run_for(&mut self, time: Duration) -> Result<(), Box<Violation>> {
        let end = self.now + time;
        while let Some((at, event)) = self.agenda.next_until(end) {
            self.advance(at);
            self.counts.steps += 1;
            self.happen(event);
            self.check_touched();
            if let Some(violation) = &self.violation {
                return Err(violation.clone());
            }
        }
        self.advance(end);
        Ok(())
    }

    fn advance(&mut self, now: Duration) {
        self.now = now;
        self.tally.advance(now);
    }

    fn check_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        self.check_places_of_vms(&touched);
        for &host in &touched {
            self.check(host);
            self.tally.set(host, &self.hosts[host].machine, &self.scenario.config);
        }
        touched.clear();
        self.touched = touched;
    }

    /// Notes that the present event changes this host.
    pub(crate) fn touch(&mut self, host: HostNumber) {
        self.touched.push(host);
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Draws a time from `longest` down to this share of it.
    pub(crate) fn time_up_to(&mut self, longest: Duration, least: f64) -> Duration {
        longest.mul_f64(self.rng.random_range(least..=1.0))
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Period(host) => self.period(host),
            Event::Arrival(packet) => self.arrive(*packet),
            Event::CallOver(host, call) => self.call_over(host, call),
            Event::JobStep(host, job) => self.job_step(host, job),
            Event::Crash(host) => self.crash(host),
            Event::Restart(host) => self.restart(host),
            Event::Cut(host) => self.cut(host),
            Event::Heal(host) => self.heal(host),
            Event::MoveStep(host, id) => self.move_step(host, id),
            Event::Await(host, id) => self.look_at_source(host, id),
            Event::Drain(host, on) => self.drain(host, on),
            Event::Order(number) => self.obey(number),
        }
    }

    /// Ends all faults: the network is fast and sound, no work fails, and no outage begins. Outages
    /// in progress end in their time.
    pub fn calm(&mut self) {
        self.scenario.network = Network::default();
        let faults = &mut self.scenario.faults;
        (faults.crashes, faults.cuts, faults.failures, faults.drains) = (0.0, 0.0, 0.0, 0.0);
    }

    /// Changes the load of a host.
    pub fn set_load(&mut self, host: usize, load: Load) {
        self.hosts[host].machine.load = load;
    }

    /// Changes the load of a VM, wherever it is.
    pub fn set_vm_load(&mut self, vm: &RegionName, load: Load) {
        let mut machines = self.hosts.iter_mut().map(|host| &mut host.machine);
        if let Some(it) = machines.find_map(|machine| machine.vms.get_mut(vm)) {
            it.spec.load = load;
        }
    }

    /// Returns the VMs that run on a host.
    pub fn vms(&self, host: usize) -> Vec<RegionName> {
        let vms = self.hosts[host].machine.vms.iter().filter(|(_, vm)| vm.runs());
        vms.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the report up to now.
    pub fn report(&self) -> Report {
        let Scenario { seed, memory, .. } = self.scenario;
        Report {
            seed,
            hosts: self.hosts.len(),
            memory,
            simulated_s: self.now.as_secs_f64(),
            counts: self.counts,
            role_changes: self.role_changes(),
            vms: self.tally.fleet.moves,
            overloaded_s: self.tally.overloaded_s(),
            usage: self.tally.usage(),
            violations: self.violation.is_some().into(),
        }
    }

    fn role_changes(&self) -> RoleChanges {
        let total = self.hosts.iter().map(|host| host.role_changes).sum();
        let most = self.hosts.iter().map(|host| host.most_changes).max().unwrap_or_default();
        let host = self.hosts.iter().find(|host| most > 0 && host.most_changes == most);
        RoleChanges {
            total,
            per_host: total as f64 / self.hosts.len().max(1) as f64,
            most_in_ten_minutes: most,
            host: host.map(|host| host.name.clone()),
        }
    }

    /// Returns the role of a host, as it last was if its agent is down.
    pub fn role(&self, host: usize) -> Role {
        self.hosts[host].role
    }

    /// Returns the bytes of a host's programs that are in other hosts' memory.
    pub fn remote(&self, host: usize) -> Bytes {
        self.hosts[host].machine.remote()
    }

    /// Returns how many leases each lender has given to this host's volumes, and how many extents.
    pub fn lenders(&self, host: usize) -> BTreeMap<HostName, u64> {
        let mut extents = BTreeMap::new();
        for place in self.hosts[host].machine.volumes.values().flat_map(|v| v.places.values()) {
            *extents.entry(place.borrowed.lender.clone()).or_default() +=
                place.borrowed.bytes.extents();
        }
        extents
    }
}

/// Puts the VMs on their hosts. Returns their names.
fn place(vms: Vec<Vec<VmSpec>>, hosts: &mut [Host]) -> Vec<RegionName> {
    let mut names = Vec::new();
    for (host, vms) in hosts.iter_mut().zip(vms) {
        for spec in vms {
            let vm = Vm::new(names.len(), spec);
            names.push(vm.spec.name.clone());
            host.machine.vms.insert(vm.spec.name.clone(), vm);
        }
    }
    names
}

/// What a test asks of a simulation that has come to rest.
impl Simulation {
    /// Returns what is left of borrowing and lending: leases, volumes, work, fins on their way,
    /// roles, and agents that are down. Empty if all is settled.
    pub fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        for host in &self.hosts {
            let (name, machine) = (&host.name, &host.machine);
            let Some(agent) = &host.agent else {
                left.push(format!("{name} has no agent"));
                continue;
            };
            let controller = agent.node.controller();
            let figures = [
                ("lease(s)", machine.store.len()),
                ("volume(s)", machine.volumes.len()),
                ("job(s)", machine.jobs.len()),
                ("fin(s)", controller.pending_releases()),
                ("lent lease(s)", controller.lent().len()),
                ("borrowed lease(s)", controller.borrowed().len()),
                ("role", usize::from(controller.role() != Role::Neutral)),
            ];
            let some = figures.iter().filter(|(_, count)| *count > 0);
            left.extend(some.map(|(what, count)| format!("{name} has {count} {what}")));
        }
        left
    }

    /// Returns the VMs that are on their way or wait for their memory, and the regions that their
    /// host's agent does not know. Empty once all moves are over.
    pub fn under_way(&self) -> Vec<String> {
        let mut under_way = Vec::new();
        for Host { name, machine, agent, .. } in &self.hosts {
            let moving = machine.moving.leaving.values().map(|it| &it.vm);
            let moving = moving.chain(machine.moving.awaited.values().map(|it| &it.vm));
            under_way.extend(moving.map(|vm| format!("{vm} moves from or to {name}")));
            let waits = machine.vms.iter().filter(|(_, vm)| vm.standing == Standing::Starts);
            under_way.extend(waits.map(|(vm, _)| format!("{vm} waits on {name}")));
            let known = agent.iter().flat_map(|agent| agent.node.controller().volumes());
            let known: BTreeSet<_> = known.map(|volume| volume.volume).collect();
            let regions: BTreeSet<_> = machine.volumes_here().map(|(id, _)| id).collect();
            let unknown = known.symmetric_difference(&regions);
            under_way.extend(unknown.map(|id| format!("volume {id} of {name} or its agent")));
        }
        under_way
    }

    /// Returns the leases that only their lender or only their borrower has. Empty while no lease
    /// leaks and none is on its way.
    pub fn unmatched(&self) -> Vec<String> {
        let at_lenders = self.hosts.iter().flat_map(|host| host.machine.store.keys().copied());
        let volumes = self.hosts.iter().flat_map(|host| host.machine.volumes.values());
        let at_borrowers =
            volumes.flat_map(|volume| volume.places.keys().chain(volume.copies.keys()).copied());
        let (lent, borrowed): (BTreeSet<_>, BTreeSet<_>) =
            (at_lenders.collect(), at_borrowers.collect());
        lent.symmetric_difference(&borrowed).map(|lease| format!("lease {lease}")).collect()
    }

    /// Returns the latest events of a host.
    pub fn latest(&self, host: usize) -> Vec<String> {
        let latest = self.hosts[host].latest().into_iter();
        latest.map(|(at, what)| format!("{:.3} s: {what}", at.as_secs_f64())).collect()
    }
}
