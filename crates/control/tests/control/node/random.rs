//! Random inputs to one node: work on one subject never runs twice at a time, each request gets
//! exactly one answer, and no grant breaks a promise to the host's own VMs.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use aquifer_control::ledger::{Class, OwnMemory};
use aquifer_control::node::{
    Answer, Found, Health, Input, LeaseReading, Output, Readings, Said, Ticket, VolumeReading, Work,
};
use aquifer_control::{Action, BorrowedStatus, Event, Message};
use aquifer_page::{Bytes, LeaseId};
use proptest::prelude::*;

use super::ledger::vm;
use super::{Shell, memory};
use crate::host::{ack, bor_fin, for_region, region_req, req};

#[derive(Clone, Debug)]
enum Happening {
    Period {
        used: u64,
        millis: u64,
    },
    /// The host's VM gets a floor and a size, in GiB.
    Vm {
        floor: u64,
        size: u64,
    },
    Offers {
        gib: u64,
    },
    Hear,
    Request {
        from_c: bool,
        request: u128,
    },
    Finish {
        at: usize,
        well: bool,
    },
    Borrow,
    /// A region asks for memory, for the first time or again.
    BorrowForRegion {
        again: bool,
    },
    /// All regions are gone.
    RemoveRegions,
    Return,
    /// The operator replaces all keys.
    RotateKeys,
    Drain(bool),
    Leave,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0..100u64, 0..3000u64).prop_map(|(used, millis)| Happening::Period { used, millis }),
        1 => (0..6u64, 0..9u64).prop_map(|(floor, size)| Happening::Vm { floor, size }),
        3 => (0..5u64).prop_map(|gib| Happening::Offers { gib }),
        6 => Just(Happening::Hear),
        2 => (any::<bool>(), 0..4u128).prop_map(|(from_c, request)| {
            Happening::Request { from_c, request }
        }),
        8 => (0..64usize, prop::bool::weighted(0.8)).prop_map(|(at, well)| {
            Happening::Finish { at, well }
        }),
        1 => Just(Happening::Borrow),
        1 => any::<bool>().prop_map(|again| Happening::BorrowForRegion { again }),
        1 => Just(Happening::RemoveRegions),
        1 => Just(Happening::Return),
        2 => Just(Happening::RotateKeys),
        1 => any::<bool>().prop_map(Happening::Drain),
        1 => Just(Happening::Leave),
    ]
}

/// A node with peers that answer each message that reaches them.
struct World {
    shell: Shell,
    own: OwnMemory,
    work: Vec<(Work, Action)>,
    asked: bool,
    /// Messages of peers on their way to the node.
    peers: VecDeque<(String, Message)>,
    leases: u128,
    /// The number of regions that have asked.
    regions: u128,
    answered: BTreeSet<Ticket>,
    /// Whether the node has left its cluster.
    left: bool,
}

impl World {
    fn new() -> Self {
        Self {
            shell: Shell::new(),
            own: OwnMemory::default(),
            work: Vec::new(),
            asked: false,
            peers: VecDeque::new(),
            leases: 0,
            regions: 0,
            answered: BTreeSet::new(),
            left: false,
        }
    }

    /// Checks the ledger and the outputs of the last input, and begins its work.
    fn take(&mut self) {
        let ledger = self.shell.node.ledger();
        let all: Bytes = Class::ALL.into_iter().map(|class| ledger.of(class)).sum();
        assert_eq!(all, ledger.total + ledger.overcommitted, "{ledger:?}");
        let controller = self.shell.node.controller();
        let spare = controller.spare().max(controller.spare_for_regions());
        assert!(spare <= ledger.available(), "{ledger:?}");
        for output in std::mem::take(&mut self.shell.outputs) {
            match output {
                Output::Begin(work, action) => {
                    if matches!(action, Action::OpenLease(_)) {
                        let ledger = self.shell.node.ledger();
                        assert_eq!(ledger.broken(), Bytes::ZERO, "{ledger:?}");
                    }
                    assert!(self.work.iter().all(|(other, _)| *other != work), "{work:?}");
                    let begins = matches!(action, Action::Activate(_) | Action::OpenLease(_));
                    assert!(!(self.left && begins), "after it left: {action:?}");
                    self.work.push((work, action));
                }
                Output::AskOffers => assert!(!std::mem::replace(&mut self.asked, true)),
                Output::Answer(ticket, answer) => {
                    assert!(ticket.0 <= self.shell.tickets, "{answer:?}");
                    assert!(self.answered.insert(ticket), "a second answer: {answer:?}");
                    self.left |= answer == Answer::Left;
                }
                _ => {}
            }
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Period { used, millis } => {
                self.shell.now += Duration::from_millis(millis);
                let own = self.own.clone();
                self.look();
                let readings = Readings { memory: memory(used), own, ..Readings::default() };
                self.shell.read(Readings { own_keys: self.firsts(), ..readings });
            }
            Happening::Vm { floor, size } => self.own = vm(floor, size),
            Happening::Offers { gib } => {
                if std::mem::take(&mut self.asked) {
                    self.shell.offers(&[("b", gib), ("c", gib / 2)]);
                }
            }
            Happening::Hear => {
                if let Some((from, message)) = self.peers.pop_front() {
                    self.shell.hear(&from, message);
                }
            }
            Happening::Request { from_c, request } => {
                let from = if from_c { "c" } else { "b" };
                let make = if request % 2 == 0 { req } else { region_req };
                self.shell.hear(from, make(request, Bytes::gib(1)));
            }
            Happening::Finish { at, well } => self.finish(at, well),
            Happening::Borrow => drop(self.shell.borrow(1)),
            Happening::BorrowForRegion { again } => {
                self.regions += u128::from(!again);
                let request = for_region(100 + self.regions, Bytes::gib(1));
                let ticket = self.shell.ticket();
                self.shell.input(Input::BorrowFor { request, ticket });
            }
            Happening::RemoveRegions => self.remove_regions(),
            Happening::Return => drop(self.shell.give_back(None)),
            Happening::RotateKeys => {
                let ticket = self.shell.ticket();
                self.shell.input(Input::RotateKeys { lease: None, ticket });
            }
            Happening::Drain(on) => drop(self.shell.drain(on)),
            Happening::Leave => drop(self.shell.leave()),
        }
        self.take();
    }

    /// Returns the leases that hold no second copies.
    fn firsts(&self) -> BTreeSet<LeaseId> {
        let borrowed = self.shell.node.controller().borrowed().into_iter();
        let firsts = borrowed.filter(|held| held.copy_of.is_none());
        firsts.map(|held| held.lease.lease).collect()
    }

    /// Lets the node find all leases well.
    fn look(&mut self) {
        let reading = |held: BorrowedStatus| VolumeReading {
            volume: held.volume,
            takes_copies: true,
            spilled: Bytes::ZERO,
            last_error: None,
            leases: vec![LeaseReading {
                lease: held.lease.lease,
                lender: held.lease.lender,
                placed: Bytes::ZERO,
                health: Health::Ok,
                copy: None,
            }],
        };
        let borrowed = self.shell.node.controller().borrowed();
        let volumes = borrowed.into_iter().map(reading).collect();
        self.shell.input(Input::Volumes(volumes));
        self.take();
    }

    /// Lets the node find that its regions are gone.
    fn remove_regions(&mut self) {
        let volumes = self.shell.node.controller().volumes().into_iter();
        let gone = volumes.filter(|volume| !volume.owner.is_swap());
        let gone = gone.map(|volume| volume.volume).collect();
        let found = Some(Found { gone, ..Found::default() });
        let (memory, own) = (self.shell.node.memory(), self.own.clone());
        self.shell.read(Readings { memory, own, found, ..Readings::default() });
    }

    fn finish(&mut self, at: usize, well: bool) {
        if self.work.is_empty() {
            return;
        }
        let (work, action) = self.work.swap_remove(at % self.work.len());
        let why = "it failed".to_owned();
        let event = match action {
            Action::Send { to, message } => {
                if well {
                    self.arrive(to.as_str(), &message);
                }
                let end = if well { Said::Taken(None) } else { Said::Lost };
                self.shell.input(Input::Said { to, message, end });
                return;
            }
            Action::Activate(live) if well => Some(Event::Activated { volume: live.volume }),
            Action::Activate(live) => Some(Event::ActivationFailed { volume: live.volume, why }),
            Action::Extend(live) => {
                let volume = live.volume;
                let leases = live.leases.into_iter().map(|lease| lease.lease);
                let unused = if well { Vec::new() } else { leases.collect() };
                Some(Event::Extended { volume, unused })
            }
            Action::Copy { onto, .. } => {
                let failed = (!well).then_some(why);
                Some(Event::Copied { lease: onto.lease, failed })
            }
            Action::Deactivate { volume } if well => Some(Event::Deactivated { volume }),
            Action::Deactivate { volume } => Some(Event::DeactivationFailed { volume, why }),
            Action::Evacuate { lease, .. } if well => {
                Some(Event::Evacuated { lease, unused: Vec::new() })
            }
            Action::Evacuate { lease, .. } => {
                Some(Event::EvacuationFailed { lease, unused: Vec::new(), why })
            }
            Action::OpenLease(lent) if well => {
                Some(Event::LeaseOpened { lease: lent.lease, uris: vec!["here".to_owned()] })
            }
            Action::OpenLease(lent) => Some(Event::LeaseFailed { lease: lent.lease, why }),
            Action::RecordLease(lent) if well => Some(Event::LeaseRecorded(lent)),
            Action::RecordLease(lent) => Some(Event::RecordFailed { lease: lent.lease, why }),
            Action::FreeLease { lease } => well.then_some(Event::LeaseFreed { lease }),
        };
        self.shell.input(Input::Done { work, event });
    }

    /// Lets a message reach a peer, which sends its answer.
    fn arrive(&mut self, to: &str, message: &Message) {
        let answer = match message {
            Message::MemBorReq { request, bytes, .. } => {
                self.leases += 1;
                ack(*request, self.leases, *bytes)
            }
            Message::MemLenFin { lease, .. } => bor_fin(*lease),
            _ => return,
        };
        self.peers.push_back((to.to_owned(), answer));
    }

    /// Ends all work well, without load and with all memory on its way home.
    fn come_to_rest(&mut self) {
        for round in 0..40 {
            if round % 10 == 0 {
                self.happen(Happening::Drain(true));
                self.happen(Happening::Return);
            }
            self.happen(Happening::Period { used: 10, millis: 1000 });
            self.happen(Happening::RemoveRegions);
            self.happen(Happening::Offers { gib: 0 });
            while !self.work.is_empty() || !self.peers.is_empty() {
                self.happen(Happening::Finish { at: 0, well: true });
                self.happen(Happening::Hear);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn each_request_gets_one_answer_and_no_work_runs_twice(
        happenings in prop::collection::vec(happening(), 0..200),
    ) {
        let mut world = World::new();
        happenings.into_iter().for_each(|happening| world.happen(happening));
        world.come_to_rest();
        let asked: BTreeSet<_> = (1..=world.shell.tickets).map(Ticket).collect();
        let waiting: Vec<_> = asked.difference(&world.answered).collect();
        prop_assert!(waiting.is_empty(), "{waiting:?} wait for an answer");
        let controller = world.shell.node.controller();
        prop_assert!(controller.lent().is_empty() && controller.volumes().is_empty());
    }

    #[test]
    fn a_node_takes_late_and_repeated_results(
        happenings in prop::collection::vec(happening(), 0..100),
    ) {
        let mut world = World::new();
        for happening in happenings {
            let before = world.work.clone();
            world.happen(happening);
            // An end may arrive twice.
            for (work, _) in before {
                if world.work.iter().all(|(other, _)| *other != work) {
                    world.shell.input(Input::Done { work, event: None });
                    world.take();
                }
            }
        }
        world.come_to_rest();
        prop_assert!(world.shell.node.controller().volumes().is_empty());
    }
}
