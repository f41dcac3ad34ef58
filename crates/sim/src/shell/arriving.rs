//! Moves of VMs at their destination: the answer of its node, and the wait of the supervisor.

use std::time::Duration;

use aquifer_control::ledger::{Claim, Ledger, Purpose};
use aquifer_control::node::{Answer, Input, Threshold};
use aquifer_page::{Bytes, Group, RegionName};

use crate::event::{Arrive, CallId, Event, HostNumber, MoveId, Reply};
use crate::invariants::Rule;
use crate::machine::{Awaited, Gone, Progress, Reason, Standing};
use crate::simulation::Simulation;

/// The time between two looks at the source.
const LOOK: Duration = Duration::from_secs(1);

/// How long a destination waits for the source to begin, as the supervisor does.
const CONNECTING: Duration = Duration::from_secs(30);

/// A question that waits for the node's answer.
#[derive(Debug)]
pub(super) struct Asked {
    from: HostNumber,
    call: CallId,
    arrive: Arrive,
    /// The ledger before.
    before: Ledger,
}

impl Simulation {
    /// Asks the node whether this host takes a VM.
    pub(super) fn ask_to_take(
        &mut self,
        host: HostNumber,
        from: HostNumber,
        call: CallId,
        arrive: Arrive,
    ) {
        if self.hosts[host].parted.contains(&from) {
            let why = "it is not a peer".to_owned();
            return self.answer_call(host, from, call, Reply::Refused(why));
        }
        let sender = self.hosts[from].name.clone();
        let claim = Claim {
            name: arrive.vm.clone(),
            purpose: Purpose::Cache,
            group: Group::default(),
            bytes: arrive.cache,
            reserve: Bytes::ZERO,
        };
        let below = Some(arrive.below);
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let (ticket, before) = (agent.ticket(), agent.node.ledger());
        agent.arrivals.insert(ticket, Asked { from, call, arrive, before });
        self.input(host, Input::TakeVm { from: sender, claim, below, ticket });
    }

    /// Takes the node's answer. If it promises memory, a supervisor starts to wait.
    pub(super) fn answer_to_arrival(&mut self, host: HostNumber, asked: Asked, answer: Answer) {
        let Asked { from, call, arrive, before } = asked;
        let reply = match answer {
            Answer::Claimed => {
                let config = &self.scenario.config;
                let share = match arrive.below {
                    Threshold::Upper => config.upper,
                    Threshold::Lower => config.lower,
                };
                self.check_promise(host, arrive.vm.clone(), (arrive.cache, share), &before);
                self.await_vm(host, from, arrive)
            }
            Answer::Failed(problem) => Reply::Refused(problem.error),
            _ => Reply::Refused("it does not say".to_owned()),
        };
        self.answer_call(host, from, call, reply);
    }

    fn await_vm(&mut self, host: HostNumber, from: HostNumber, arrive: Arrive) -> Reply {
        let Arrive { id, vm, size, cache, below, memory } = arrive;
        let sender = self.hosts[from].name.clone();
        let machine = &self.hosts[host].machine;
        let is_here = machine.vms.contains_key(&vm)
            || machine.moving.gone.contains_key(&vm)
            || machine.moving.awaited.values().any(|it| it.vm == vm);
        if is_here {
            return Reply::Refused(format!("files of {vm} are here"));
        }
        if let Some(why) = self.draw_failure() {
            self.counts.failures += 1;
            self.input(host, Input::LostVm { from: sender, vm, why: why.clone() });
            return Reply::Refused(why);
        }
        let reason = match below {
            Threshold::Lower => Reason::Overload,
            Threshold::Upper => Reason::Drain,
        };
        if let Some((volume, leases)) = &memory {
            let (volume, leases) = (*volume, leases.keys().copied().collect());
            if let Some(agent) = &mut self.hosts[host].agent {
                agent.known.expected.insert(volume);
            }
            self.input(host, Input::Expect { volume, leases });
        }
        let (since, is_connected) = (self.now, false);
        let awaited = Awaited { vm, from, reason, size, cache, memory, since, is_connected };
        self.hosts[host].machine.moving.awaited.insert(id, awaited);
        self.agenda.enter(self.now + LOOK, Event::Await(host, id));
        Reply::Done
    }

    /// Looks at the source of a VM that this host awaits.
    pub(crate) fn look_at_source(&mut self, host: HostNumber, id: MoveId) {
        let Some(awaited) = self.hosts[host].machine.moving.awaited.get(&id) else { return };
        let progress =
            self.hosts[awaited.from].machine.moving.leaving.get(&id).map(|it| it.progress);
        let waits = self.now - awaited.since < CONNECTING;
        let goes_on = match (self.is_cut_off(host, awaited.from), progress) {
            (false, Some(Progress::HandedOver)) => return self.take(host, id),
            (false, None) => !awaited.is_connected && waits,
            (false, Some(_)) => true,
            (true, _) => awaited.is_connected || waits,
        };
        if goes_on {
            return self.agenda.enter(self.now + LOOK, Event::Await(host, id));
        }
        self.touch(host);
        self.hosts[host].machine.moving.awaited.remove(&id);
    }

    /// Takes a VM that the source has handed over.
    fn take(&mut self, host: HostNumber, id: MoveId) {
        let Some(awaited) = self.hosts[host].machine.moving.awaited.remove(&id) else { return };
        let Awaited { vm: name, from, reason, .. } = awaited;
        self.touch(host);
        self.touch(from);
        let source = &mut self.hosts[from].machine;
        let Some(mut vm) = source.vms.remove(&name) else { return };
        let volume = vm.volume;
        source.moving.gone.insert(name.clone(), Gone { volume, to: host });
        let memory = volume.and_then(|volume| Some((volume, source.volumes.remove(&volume)?)));
        self.tally.fleet.moves.leases +=
            memory.iter().map(|(_, volume)| volume.places.len() as u64).sum::<u64>();
        vm.standing = Standing::Runs;
        vm.history.arrived = Some(self.now);
        self.count_move(host, &name, reason, vm.history.relieved);
        if reason == Reason::Overload {
            vm.history.relieved = Some(self.now);
        }
        let at = &mut self.hosts[host];
        at.note(self.now, format!("takes {name}, for {reason:?}"));
        at.machine.vms.insert(name, vm);
        at.machine.volumes.extend(memory.map(|(id, volume)| (id, volume.of_next_generation())));
    }

    pub(crate) fn count_move(
        &mut self,
        host: HostNumber,
        vm: &RegionName,
        reason: Reason,
        relieved: Option<Duration>,
    ) {
        let counts = &mut self.tally.fleet.moves;
        match reason {
            Reason::Drain => return counts.for_drains += 1,
            Reason::Overload => counts.for_overload += 1,
        }
        let Some(apart) = relieved.map(|last| self.now - last) else { return };
        let shortest = counts.shortest_s.unwrap_or(f64::INFINITY);
        counts.shortest_s = Some(shortest.min(apart.as_secs_f64()));
        if apart < crate::host::OSCILLATION {
            let (vm, name) = (vm.clone(), self.hosts[host].name.clone());
            self.violate(Rule::Oscillates { vm, host: name, apart }, &[host]);
        }
    }
}
