//! Tests of second copies of the pages that a host swaps out.

use aquifer_control::node::{CopyReading, Health, Input, LeaseReading, VolumeReading, Work};
use aquifer_control::{
    Action, Config, Event, Message, Owner, Protection, Protections, Restored, Role,
};
use aquifer_page::{Bytes, LeaseId, VolumeId};

use super::{LEASE, Shell};
use crate::host::{ack, bor_fin, copies_req, len_fin, name};

const COPY: LeaseId = LeaseId(2);

/// A host that swaps to 1 GiB of `b`.
struct Swapping {
    shell: Shell,
    volume: VolumeId,
}

impl Swapping {
    fn with(protection: Protection) -> Self {
        let protection = Protections { swap: protection, ..Protections::default() };
        let config = Config { protection, ..crate::host::config() };
        let mut shell = Shell::with(Restored::default(), config);
        shell.input(Input::Peers(["b", "c", "d"].map(name).into()));
        let volume = shell.swap();
        Self { shell, volume }
    }

    /// Tells the node which of the two lenders answer; `None` if there is no second one.
    fn look(&mut self, first_answers: bool, answers: Option<bool>) {
        self.look_at(first_answers, answers, true);
    }

    fn look_at(&mut self, first_answers: bool, answers: Option<bool>, takes_copies: bool) {
        let copy = |answers| CopyReading {
            lease: COPY,
            first_answers,
            answers,
            lacks: Bytes::ZERO,
            first_lacks: Bytes::ZERO,
        };
        let lease = LeaseReading {
            lease: LEASE,
            lender: name("b"),
            placed: Bytes::mib(64),
            health: Health::Ok,
            copy: answers.map(copy),
        };
        let reading = VolumeReading {
            volume: self.volume,
            spilled: Bytes::ZERO,
            last_error: None,
            takes_copies,
            leases: vec![lease],
        };
        self.shell.input(Input::Volumes(vec![reading]));
    }

    /// Runs periods, with a look in each, until the node begins an action for which `is` holds.
    fn until(
        &mut self,
        seen: (bool, Option<bool>),
        lenders: &[(&str, u64)],
        is: impl Fn(&Action) -> bool,
    ) -> Action {
        for _ in 0..100 {
            self.look(seen.0, seen.1);
            self.shell.period(20);
            if self.shell.asks_offers() {
                self.shell.offers(lenders);
            }
            if let Some(action) = self.shell.begun().into_iter().find(&is) {
                return action;
            }
        }
        panic!("it does not begin that: {:?}", self.shell.outputs);
    }

    /// Lets the node get its second copy at `c`.
    fn copied(mut self) -> Self {
        let asks = |action: &Action| {
            matches!(action, Action::Send { message: Message::MemBorReq { .. }, .. })
        };
        let asked = self.until((true, None), &[("b", 9), ("c", 4)], asks);
        let Action::Send { to, message: Message::MemBorReq { request, owner, bytes, .. } } = asked
        else {
            panic!("{asked:?}")
        };
        assert_eq!((to, owner), (name("c"), Owner::Swap), "not the lender of the first copy");
        self.shell.hear("c", ack(request, COPY.0, bytes));
        let begun = self.shell.begun();
        let [Action::Copy { volume, of: LEASE, onto }] = &begun[..] else { panic!("{begun:?}") };
        assert_eq!((*volume, onto.lease), (self.volume, COPY));
        self.shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed: None });
        self
    }

    /// Lets the order to give the swap back through.
    fn deactivates(&mut self) -> bool {
        self.shell.begun().contains(&Action::Deactivate { volume: self.volume })
    }
}

#[test]
fn swap_has_one_copy_unless_it_is_to_have_two() {
    let mut alone = Swapping::with(Protection::None);
    for _ in 0..100 {
        alone.look(true, None);
        assert!(!alone.shell.period(20).asks_offers());
    }
    Swapping::with(Protection::Mirror).copied();
    Swapping::with(Protection::Opportunistic).copied();
}

#[test]
fn a_volume_that_the_kernel_attaches_gets_no_copy() {
    let mut direct = Swapping::with(Protection::Mirror);
    for _ in 0..100 {
        direct.look_at(true, None, false);
        assert!(!direct.shell.period(20).asks_offers());
    }
}

#[test]
fn swap_goes_back_with_its_copies() {
    let mut swapping = Swapping::with(Protection::Mirror).copied();
    let volume = swapping.volume;
    swapping.shell.give_back(Some(volume));
    assert!(swapping.deactivates());
    swapping.shell.done(Work::Volume(volume), Event::Deactivated { volume });
    let sent = swapping.shell.sent();
    for (lender, lease) in [("b", LEASE), ("c", COPY)] {
        assert!(sent.contains(&(lender.to_owned(), bor_fin(lease))), "{sent:?}");
    }
}

#[test]
fn swap_goes_back_after_a_copy_has_begun() {
    let mut swapping = Swapping::with(Protection::Mirror);
    swapping.look(true, None);
    swapping.shell.period(20).offers(&[("c", 4)]);
    let (_, request) = swapping.shell.sent().pop().expect("a request");
    let Message::MemBorReq { request, bytes, .. } = request else { panic!("{request:?}") };
    swapping.shell.hear("c", ack(request, COPY.0, bytes));
    let volume = swapping.volume;
    swapping.shell.give_back(Some(volume));
    assert!(!swapping.deactivates(), "its process is about to begin the copy");
    swapping.shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed: None });
    swapping.shell.period(20);
    if swapping.shell.asks_offers() {
        swapping.shell.offers(&[]);
    }
    assert!(swapping.deactivates(), "{:?}", swapping.shell.outputs);
}

#[test]
fn copies_leave_the_disk_alone_until_their_lender_wants_them() {
    let mut swapping = Swapping::with(Protection::Mirror).copied();
    let leaves = |action: &Action| matches!(action, Action::Evacuate { lease: LEASE, .. });
    let fails = |swapping: &mut Swapping, lease| {
        let event =
            Event::EvacuationFailed { lease, unused: Vec::new(), why: "it cannot".to_owned() };
        swapping.shell.done(Work::Lease(lease), event);
    };
    let left = swapping.until((false, Some(true)), &[], leaves);
    assert!(matches!(left, Action::Evacuate { spills: false, .. }), "{left:?}");
    fails(&mut swapping, LEASE);
    swapping.shell.hear("c", len_fin(COPY.0));
    if swapping.shell.asks_offers() {
        swapping.shell.offers(&[]);
    }
    fails(&mut swapping, COPY);
    let left = swapping.until((false, Some(true)), &[], leaves);
    assert!(matches!(left, Action::Evacuate { spills: true, .. }), "{left:?}");
}

#[test]
fn copies_that_go_first_do_not_make_a_host_a_lender() {
    let mut shell = Shell::with(Restored::default(), crate::host::config());
    shell.input(Input::Peers(["b", "c"].map(name).into()));
    let Message::MemBorReq { request, bytes, group, goes_first, .. } = copies_req(1, Bytes::gib(1))
    else {
        panic!("a request")
    };
    let owner = Owner::Swap;
    let request = Message::MemBorReq { request, bytes, owner, group, goes_first };
    shell.period(20).hear("c", request);
    let begun = shell.begun();
    let [Action::OpenLease(lent)] = &begun[..] else { panic!("{begun:?}") };
    assert!(lent.goes_first && !lent.makes_lender());
    let lease = lent.lease;
    shell.done(Work::Lease(lease), Event::LeaseOpened { lease, uris: vec!["here".to_owned()] });
    assert_eq!(shell.node.controller().role(), Role::Neutral);
    // It may swap to another host itself.
    shell.swap();
    assert_eq!(shell.node.controller().role(), Role::Borrower);
}
