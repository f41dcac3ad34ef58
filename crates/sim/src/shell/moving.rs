//! Moves of VMs at their source, as their supervisors perform them.

use std::time::Duration;

use aquifer_control::node::{Input, MoveEnd};
use aquifer_page::{Bytes, RegionName};

use crate::event::{Arrive, Event, HostNumber, MoveId};
use crate::machine::{Leaving, Progress, Standing};
use crate::simulation::Simulation;

/// The bytes of one step of a copy.
const CHUNK: Bytes = Bytes::mib(256);

/// The time of a step besides its bytes.
const STEP: Duration = Duration::from_millis(1);

/// The pause between two attempts to reach the other host.
const RETRY: Duration = Duration::from_millis(500);

/// How long a copy waits for a host that does not answer, as the supervisor does.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long the record of a VM stays that is on another host.
const RECORD: Duration = Duration::from_secs(5);

impl Simulation {
    /// Orders the move from the VM's supervisor.
    pub(super) fn begin_leaving(&mut self, host: HostNumber, to: HostNumber, arrive: Arrive) {
        let Arrive { id, vm, memory, .. } = arrive;
        let fails = self.draw_failure();
        let at = &mut self.hosts[host];
        let may_leave = at.machine.may_leave(&vm, memory.as_ref());
        let Some(it) = at.machine.vms.get_mut(&vm).filter(|_| may_leave) else {
            let why = "its memory has changed its leases meanwhile".to_owned();
            let to = Some(self.hosts[to].name.clone());
            return self.tell_end(host, vm, MoveEnd::Failed { to, why });
        };
        it.standing = Standing::Leaves(id);
        let leaving = Leaving {
            to,
            ordered_by: at.starts,
            progress: Progress::Copies,
            left: it.dirty(),
            sent: Bytes::ZERO,
            fails,
            is_cancelled: false,
            waits_since: None,
            vm,
        };
        at.machine.moving.leaving.insert(id, leaving);
        self.agenda.enter(self.now + STEP, Event::MoveStep(host, id));
    }

    /// Takes the next step of a move.
    pub(crate) fn move_step(&mut self, host: HostNumber, id: MoveId) {
        let Some(leaving) = self.hosts[host].machine.moving.leaving.get(&id).cloned() else {
            return;
        };
        self.touch(host);
        match leaving.progress {
            Progress::Copies => self.copy_vm(host, id, &leaving),
            Progress::HandedOver => self.confirm(host, id, leaving),
            Progress::Over => {
                let machine = &mut self.hosts[host].machine;
                machine.moving.leaving.remove(&id);
                machine.moving.gone.remove(&leaving.vm);
            }
        }
    }

    fn copy_vm(&mut self, host: HostNumber, id: MoveId, leaving: &Leaving) {
        if leaving.is_cancelled {
            return self.stay(host, id, MoveEnd::Cancelled);
        }
        let to = Some(self.hosts[leaving.to].name.clone());
        if let Some(why) = leaving.fails.clone() {
            self.counts.failures += 1;
            return self.stay(host, id, MoveEnd::Failed { to, why });
        }
        if self.is_cut_off(host, leaving.to) {
            let since = leaving.waits_since.unwrap_or(self.now);
            if self.now - since >= TIMEOUT {
                let why = "the destination does not answer".to_owned();
                return self.stay(host, id, MoveEnd::Failed { to, why });
            }
            self.set_leaving(host, id, |leaving| leaving.waits_since = Some(since));
            return self.agenda.enter(self.now + RETRY, Event::MoveStep(host, id));
        }
        let awaited = self.hosts[leaving.to].machine.moving.awaited.get_mut(&id);
        let Some(awaited) = awaited else {
            let why = "the destination does not wait for it any more".to_owned();
            return self.stay(host, id, MoveEnd::Failed { to, why });
        };
        awaited.is_connected = true;
        if leaving.left == Bytes::ZERO {
            return self.hand_over(host, id, leaving);
        }
        let chunk = leaving.left.min(CHUNK);
        self.set_leaving(host, id, |leaving| {
            leaving.waits_since = None;
            leaving.left = leaving.left - chunk;
            leaving.sent += chunk;
        });
        let seconds = chunk.0 as f64 / self.scenario.costs.bandwidth.0.max(1) as f64;
        let at = self.now + STEP + Duration::from_secs_f64(seconds);
        self.agenda.enter(at, Event::MoveStep(host, id));
    }

    fn set_leaving(&mut self, host: HostNumber, id: MoveId, set: impl FnOnce(&mut Leaving)) {
        if let Some(leaving) = self.hosts[host].machine.moving.leaving.get_mut(&id) {
            set(leaving);
        }
    }

    /// Stops the VM, and records that it belongs to the destination.
    fn hand_over(&mut self, host: HostNumber, id: MoveId, leaving: &Leaving) {
        if let Err(why) = self.empty_cache(host, &leaving.vm) {
            let to = Some(self.hosts[leaving.to].name.clone());
            return self.stay(host, id, MoveEnd::Failed { to, why });
        }
        let at = &mut self.hosts[host];
        let Some(vm) = at.machine.vms.get_mut(&leaving.vm) else { return };
        vm.standing = Standing::HandedOver(id);
        // Second copies do not move: the destination asks for new ones.
        let volume = vm.volume.and_then(|volume| at.machine.volumes.get_mut(&volume));
        volume.into_iter().for_each(|volume| volume.copies.clear());
        at.note(self.now, format!("hands over {} to host {}", leaving.vm, leaving.to));
        self.set_leaving(host, id, |leaving| leaving.progress = Progress::HandedOver);
        let at = self.arrival();
        self.agenda.enter(at, Event::Await(leaving.to, id));
        self.agenda.enter(self.now + RETRY, Event::MoveStep(host, id));
    }

    /// Moves all pages of a VM out of its cache, so that another host can read them.
    fn empty_cache(&mut self, host: HostNumber, vm: &RegionName) -> Result<(), String> {
        let reached = self.reached(host);
        let (emptied, postings) = self.hosts[host].machine.empty_cache(vm, &reached);
        self.post(host, postings);
        emptied
    }

    /// Ends a move before the hand-over.
    fn stay(&mut self, host: HostNumber, id: MoveId, end: MoveEnd) {
        let machine = &mut self.hosts[host].machine;
        let Some(leaving) = machine.moving.leaving.remove(&id) else { return };
        if let Some(vm) = machine.vms.get_mut(&leaving.vm) {
            vm.standing = Standing::Runs;
        }
        self.end_move(host, leaving, end);
    }

    /// Ends a move, once the destination has the VM.
    fn confirm(&mut self, host: HostNumber, id: MoveId, leaving: Leaving) {
        let to = &self.hosts[leaving.to];
        if self.is_cut_off(host, leaving.to) || to.machine.moving.awaited.contains_key(&id) {
            return self.agenda.enter(self.now + RETRY, Event::MoveStep(host, id));
        }
        let (to, sent) = (to.name.clone(), leaving.sent);
        self.set_leaving(host, id, |leaving| leaving.progress = Progress::Over);
        self.agenda.enter(self.now + RECORD, Event::MoveStep(host, id));
        let why = "it had most room".to_owned();
        self.end_move(host, leaving, MoveEnd::Moved { to, sent, why });
    }

    /// Reports the end of a move to the agent that ordered it, if that still runs.
    fn end_move(&mut self, host: HostNumber, leaving: Leaving, end: MoveEnd) {
        let at = &self.hosts[host];
        if at.starts == leaving.ordered_by && at.agent.is_some() {
            return self.tell_end(host, leaving.vm, end);
        }
        self.count_end(&end);
    }

    pub(super) fn tell_end(&mut self, host: HostNumber, vm: RegionName, end: MoveEnd) {
        self.count_end(&end);
        self.input(host, Input::MoveEnded { vm, end });
    }

    fn count_end(&mut self, end: &MoveEnd) {
        let counts = &mut self.tally.fleet.moves;
        match end {
            MoveEnd::Moved { .. } => {}
            MoveEnd::Refused { .. } => counts.refused += 1,
            MoveEnd::Failed { .. } => counts.failed += 1,
            MoveEnd::Cancelled => counts.cancelled += 1,
        }
    }

    /// Cancels the moves of an agent that dies. Supervisors complete those that they handed over.
    pub(super) fn cancel_moves_of_dead(&mut self, host: HostNumber) {
        let at = &mut self.hosts[host];
        let of_it = at.machine.moving.leaving.values_mut().filter(|it| it.ordered_by == at.starts);
        of_it.for_each(|leaving| leaving.is_cancelled = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, Command, Load, Scenario, VmSpec};

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Returns a simulation of three hosts, of which `a` has begun to move a VM of 1 GiB in
    /// borrowed memory. The copy takes 16 s.
    fn moving() -> Simulation {
        let names = ["a", "b", "c"].map(|name| name.parse().unwrap());
        let hosts = names.map(|name| (name, Load::constant(Bytes::gib(1))));
        let mut scenario = Scenario::new(hosts.into(), Bytes::gib(8), seconds(600), 1);
        scenario.costs.bandwidth = Bytes::mib(64);
        (scenario.faults.crashes, scenario.faults.longest) = (1e-9, seconds(20));
        let size = Bytes::gib(1);
        let (load, backing) = (Load::constant(size), Backing::Borrowed);
        let vm = VmSpec { name: vm(), size, cache: size, backing, load, dirty: 1.0 };
        let mut simulation = Simulation::new(Scenario { vms: vec![vec![vm]], ..scenario });
        simulation.run_for(seconds(60)).unwrap();
        simulation.order(0, Command::Vacate(true));
        simulation.run_for(seconds(5)).unwrap();
        assert_eq!(simulation.hosts[0].machine.moving.leaving.len(), 1);
        simulation
    }

    fn vm() -> RegionName {
        "vm".parse().unwrap()
    }

    fn destination(simulation: &Simulation) -> HostNumber {
        simulation.hosts[0].machine.moving.leaving.values().next().unwrap().to
    }

    #[test]
    fn a_vm_stays_if_its_destination_is_cut_off() {
        let mut simulation = moving();
        let to = destination(&simulation);
        simulation.hosts[to].is_cut = true;
        simulation.run_for(seconds(15)).unwrap();
        assert_eq!((simulation.vms(0), simulation.vms(to)), (vec![vm()], vec![]));
        assert_eq!(simulation.report().vms.failed, 1);
        simulation.heal(to);
        simulation.run_for(seconds(120)).unwrap();
        assert_eq!(simulation.vms(0), [], "the drain tries again");
        assert_eq!(simulation.unmatched(), Vec::<String>::new());
    }

    #[test]
    fn a_vm_stays_if_the_agent_of_its_host_dies() {
        let mut simulation = moving();
        simulation.crash(0);
        simulation.run_for(seconds(5)).unwrap();
        assert_eq!(simulation.report().vms.cancelled, 1);
        assert_eq!(simulation.vms(0), [vm()]);
        simulation.run_for(seconds(120)).unwrap();
        assert_eq!(simulation.vms(0), [], "the next agent goes on with the drain");
    }

    #[test]
    fn a_vm_that_is_handed_over_arrives_without_agents() {
        let mut simulation = moving();
        let to = destination(&simulation);
        let is_handed_over = |simulation: &Simulation| {
            let mut leaving = simulation.hosts[0].machine.moving.leaving.values();
            leaving.any(|leaving| leaving.progress == Progress::HandedOver)
        };
        while !is_handed_over(&simulation) {
            simulation.run_for(Duration::from_micros(100)).unwrap();
        }
        simulation.hosts[to].is_cut = true;
        simulation.crash(0);
        simulation.crash(to);
        simulation.run_for(seconds(10)).unwrap();
        assert_eq!((simulation.vms(0), simulation.vms(to)), (vec![], vec![]), "it stands still");
        simulation.hosts[to].is_cut = false;
        simulation.run_for(seconds(2)).unwrap();
        assert_eq!((simulation.vms(0), simulation.vms(to)), (vec![], vec![vm()]));
        simulation.run_for(seconds(300)).unwrap();
        assert_eq!(simulation.under_way(), Vec::<String>::new());
        assert_eq!(simulation.unmatched(), Vec::<String>::new());
    }
}
