//! Tests of requests for regions: their answers, their turn, and regions that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::node::{Answer, Found, Input, Output, Readings, Said, Work};
use aquifer_control::{Action, Event, LoanState, Message, Owner, Role, Subject};
use aquifer_page::{Bytes, VolumeId};

use super::{LEASE, Shell, memory};
use crate::host::{ack, bor_fin, name, region_req, rej};

const VOLUME: VolumeId = VolumeId(5);

/// Finds that the region of [`VOLUME`] is gone, as a period does.
fn finds_it_gone(shell: &mut Shell) {
    let found = Some(Found { gone: vec![VOLUME], ..Found::default() });
    shell.after(1).read(Readings { memory: memory(20), found, ..Readings::default() });
}

/// Lets `b` grant [`LEASE`] to the region `items`, which uses it.
fn with_a_region() -> Shell {
    let mut shell = Shell::new();
    shell.period(20).borrow_for().offers(&[("b", 4)]);
    assert_eq!(shell.granted(), VOLUME);
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    shell
}

#[test]
fn a_region_s_request_is_answered_with_its_leases() {
    let mut shell = Shell::new();
    shell.period(20).borrow_for();
    assert!(shell.asks_offers() && shell.answers().is_empty());
    assert_eq!(shell.node.requested(), Bytes::gib(1), "offers must reach as far");
    shell.offers(&[("b", 4)]).granted();
    let answers = shell.answers();
    let [(1, Answer::Provided(live)), _] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!((live.volume, live.bytes, live.leases[0].lease), (VOLUME, Bytes::gib(1), LEASE));
    assert_eq!(live.owner, Owner::Region("items".parse().unwrap()));
    assert_eq!(shell.node.controller().role(), Role::Neutral, "roles are about swap");
    assert!(shell.node.holds(VOLUME));
    let of_region = |output: &Output| {
        matches!(output, Output::Decision { about, .. }
        if about.contains(&Subject::Region("items".parse().unwrap())))
    };
    assert!(shell.outputs.iter().any(of_region), "{:?}", shell.outputs);
}

#[test]
fn a_copy_of_a_region_s_request_gets_no_second_lease() {
    let mut shell = Shell::new();
    shell.period(20).borrow_for().borrow_for();
    assert!(shell.failure().contains("asked for already"));
    shell.offers(&[("b", 4)]);
    assert_eq!(shell.sent().len(), 1);
    shell.granted();
    assert!(shell.borrow_for().failure().contains("asked for already"));
}

#[test]
fn a_region_that_gets_too_little_gives_it_back() {
    let mut shell = Shell::new();
    shell.period(20).borrow_for().offers(&[("b", 1)]);
    let (to, request) = shell.sent().pop().unwrap();
    let Message::MemBorReq { request: id, .. } = request else { panic!("{request:?}") };
    shell.said(&to, request, Said::Taken(None));
    shell.hear("b", rej(id, Bytes::mib(512), aquifer_control::Reason::NoRoom));
    let (_, request) = shell.sent().pop().unwrap();
    let Message::MemBorReq { request: id, bytes, .. } = request else { panic!("{request:?}") };
    assert_eq!(bytes, Bytes::mib(512));
    shell.hear("b", ack(id, LEASE.0, bytes));
    assert!(shell.answers().contains(&(1, Answer::NobodyLends(Bytes::gib(1)))));
    assert!(shell.sent().contains(&("b".to_owned(), bor_fin(LEASE))));
    assert!(!shell.node.holds(VOLUME));
}

#[test]
fn a_region_beyond_borrow_max_is_refused_with_the_key() {
    let mut shell = Shell::new();
    let request = crate::host::for_region(5, Bytes::gib(4));
    let ticket = shell.ticket();
    shell.period(20).input(Input::BorrowFor { request, ticket });
    shell.offers(&[("b", 9)]);
    assert!(shell.failure().contains("borrow.max is 3GiB"), "{}", shell.failure());
}

#[test]
fn a_request_waits_for_another_round_to_end() {
    let mut shell = Shell::new();
    shell.period(20).borrow(1);
    shell.borrow_for().offers(&[("b", 4)]);
    let (to, first) = shell.sent().pop().unwrap();
    let Message::MemBorReq { request, bytes, owner: Owner::Swap, .. } = first.clone() else {
        panic!("{first:?}")
    };
    shell.said(&to, first, Said::Taken(None));
    assert!(shell.period(20).asks_offers(), "the waiting request needs fresh offers");
    shell.offers(&[("b", 3)]);
    shell.hear("b", ack(request, 9, bytes));
    let (_, second) = shell.sent().pop().unwrap();
    let of_region = matches!(second, Message::MemBorReq { owner: Owner::Region(_), .. });
    assert!(of_region, "{second:?}");
}

#[test]
fn the_leases_of_a_region_that_is_gone_go_back() {
    let mut shell = with_a_region();
    finds_it_gone(&mut shell);
    assert!(shell.sent().contains(&("b".to_owned(), bor_fin(LEASE))), "{:?}", shell.outputs);
    assert!(shell.node.controller().borrowed().is_empty());
    finds_it_gone(&mut shell);
    assert!(!shell.sent().contains(&("b".to_owned(), bor_fin(LEASE))), "once");
}

#[test]
fn a_region_in_the_making_is_not_taken_for_gone() {
    let mut shell = Shell::new();
    shell.period(20).borrow_for().offers(&[("b", 4)]).granted();
    finds_it_gone(&mut shell);
    assert!(shell.node.holds(VOLUME) && shell.sent().is_empty());
    let why = "its creator is gone".to_owned();
    shell.done(Work::Volume(VOLUME), Event::ActivationFailed { volume: VOLUME, why });
    assert!(shell.sent().contains(&("b".to_owned(), bor_fin(LEASE))));
    assert!(!shell.node.holds(VOLUME));
}

#[test]
fn an_order_to_return_all_leaves_regions_alone() {
    let mut shell = with_a_region();
    assert_eq!(shell.give_back(None).answer(), Answer::Returned(Vec::new()));
    assert!(shell.give_back(Some(VOLUME)).failure().contains("has no volume"));
    assert!(shell.node.holds(VOLUME));
    assert!(shell.leave().tie().contains("such as items"));
}

#[test]
fn a_host_leaves_once_what_its_regions_had_is_back() {
    let mut shell = with_a_region();
    finds_it_gone(&mut shell);
    assert!(shell.leave().tie().starts_with("this host is about"), "it gives the lease back");
    shell.said("b", bor_fin(LEASE), Said::Taken(None));
    assert_eq!(shell.leave().answer(), Answer::Left);
}

#[test]
fn an_overloaded_host_borrows_for_swap_beside_its_regions() {
    let mut shell = with_a_region();
    shell.after(60).period(90).offers(&[("c", 4)]);
    let (to, request) = shell.sent().pop().unwrap();
    assert!(matches!(request, Message::MemBorReq { owner: Owner::Swap, .. }), "{request:?}");
    let Message::MemBorReq { request: id, bytes, .. } = request.clone() else { unreachable!() };
    shell.said(&to, request, Said::Taken(None)).hear("c", ack(id, 7, bytes));
    let begun = shell.begun();
    let [Action::Activate(live)] = &begun[..] else { panic!("{begun:?}") };
    shell.done(Work::Volume(live.volume), Event::Activated { volume: live.volume });
    assert_eq!(shell.node.controller().role(), Role::Borrower);
    // The load goes: the volume for swap leaves, and the region stays.
    shell.after(1).period(20);
    let leaves = Action::Deactivate { volume: live.volume };
    assert!(shell.begun().contains(&leaves), "{:?}", shell.outputs);
    assert!(!shell.begun().contains(&Action::Deactivate { volume: VOLUME }));
}

#[test]
fn a_former_peer_s_lease_under_a_region_is_vacated() {
    let mut shell = with_a_region();
    shell.input(Input::Peers([name("c")].into()));
    for _ in 0..11 {
        shell.period(20).offers(&[("c", 4)]);
        if let Some((to, request)) = shell.sent().pop() {
            let Message::MemBorReq { request: id, bytes, .. } = request.clone() else {
                panic!("{request:?}")
            };
            shell.said(&to, request, Said::Taken(None)).hear("c", ack(id, 8, bytes));
            break;
        }
    }
    let begun = shell.begun();
    let [Action::Evacuate { volume, lease, onto, .. }] = &begun[..] else { panic!("{begun:?}") };
    assert_eq!((*volume, *lease, onto[0].lease.0), (VOLUME, LEASE, 8));
    assert!(shell.now > Duration::ZERO);
}

#[test]
fn a_host_that_leaves_after_a_move_takes_no_lease_from_the_next() {
    let mut shell = Shell::new();
    shell.period(20).hear("b", region_req(1, Bytes::gib(1)));
    let lent = match &shell.begun()[..] {
        [Action::OpenLease(lent)] => lent.clone(),
        other => panic!("one lease to open was expected, not {other:?}"),
    };
    let lease = lent.lease;
    let opened = Event::LeaseOpened { lease, uris: vec!["here".to_owned()] };
    let (to, message) = shell.done(Work::Lease(lease), opened).sent().pop().unwrap();
    shell.said(&to, message, Said::Taken(None));

    let (ticket, to) = (shell.ticket(), name("c"));
    shell.input(Input::Permit { from: name("b"), lease, generation: 0, to, ticket });
    let [Action::RecordLease(lent)] = &shell.begun()[..] else { panic!("{:?}", shell.outputs) };
    let recorded = Event::LeaseRecorded(lent.clone());
    assert_eq!(shell.done(Work::Lease(lease), recorded).answer(), Answer::Permitted);

    // The region moves to `c`, and `b` leaves the cluster before this host hears of that.
    shell.input(Input::Peers(BTreeSet::from([name("c")])));
    shell.after(60).period(20).offers(&[]);
    let state = |shell: &Shell| shell.node.controller().lent()[0].state;
    assert_eq!(state(&shell), LoanState::Recalled);
    let (ticket, generations) = (shell.ticket(), BTreeMap::from([(lease, 1)]));
    let (from, io_timeout_ms) = (name("c"), None);
    shell.input(Input::Renewal { from, leases: vec![lease], generations, io_timeout_ms, ticket });
    assert_eq!(shell.node.controller().lent()[0].lease.borrower, name("c"));
    assert_eq!(state(&shell), LoanState::Held, "`c` is a peer");
    shell.after(60).period(20);
    assert_eq!(state(&shell), LoanState::Held);
    // Another reason stays.
    shell.drain(true);
    assert_eq!(state(&shell), LoanState::Recalled);
}
