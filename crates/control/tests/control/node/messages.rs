//! Tests of peers' messages, of this host's own, and of hosts that are no longer peers.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_control::node::{Answer, EventKind, Input, Output, Said, Work};
use aquifer_control::{
    Action, BorrowedLease, Cause, Event, LentLease, LiveVolume, Message, Owner, Reason, RequestId,
    Restored,
};
use aquifer_page::{Bytes, Group, LeaseId, VolumeId};

use super::{LEASE, Shell};
use crate::host::{ack, bor_fin, len_fin, name, rej, req};

/// Returns a host that the former peer `x` has lent [`LEASE`], and that has lent lease 2 to `x`.
fn with_a_former_peer() -> Shell {
    let lease = BorrowedLease {
        lease: LEASE,
        lender: name("x"),
        bytes: Bytes::gib(1),
        uris: vec!["there".to_owned()],
        generation: 0,
    };
    let volume = LiveVolume {
        volume: VolumeId(3),
        bytes: Bytes::gib(1),
        owner: Owner::Swap,
        group: Group::default(),
        cause: Cause::ByHand,
        leases: vec![lease],
        copies: Vec::new(),
    };
    let lent = LentLease {
        lease: LeaseId(2),
        borrower: name("x"),
        owner: Owner::Swap,
        group: Group::default(),
        bytes: Bytes::gib(1),
        request: RequestId(2),
        generation: 0,
        next: BTreeSet::new(),
        goes_first: false,
    };
    let lent = vec![(lent, vec!["here".to_owned()])];
    Shell::of(Restored { lent, volumes: vec![volume], ..Restored::default() })
}

#[test]
fn a_former_peer_may_only_settle_its_leases() {
    let mut shell = with_a_former_peer();
    for message in [
        req(1, Bytes::gib(1)),
        rej(RequestId(1), Bytes::ZERO, Reason::NoRoom),
        ack(RequestId(1), 9, Bytes::gib(1)),
        bor_fin(LEASE),
        len_fin(2),
    ] {
        assert_eq!(shell.hear("x", message.clone()).answer(), Answer::NoPeer, "{message:?}");
        assert_eq!(shell.outputs.len(), 1, "nothing else happens");
    }
    assert_eq!(shell.hear("y", bor_fin(LeaseId(2))).answer(), Answer::NoPeer, "nor may a third");
    assert_eq!(shell.hear("x", ack(RequestId(1), 1, Bytes::gib(1))).answer(), Answer::Heard(None));
    shell.hear("x", bor_fin(LeaseId(2)));
    assert_eq!(shell.begun(), [Action::FreeLease { lease: LeaseId(2) }]);
    assert_eq!(shell.freed(LeaseId(2)).answer(), Answer::Heard(None));
    assert!(shell.hear("x", len_fin(1)).asks_offers());
    assert_eq!(shell.offers(&[]).answer(), Answer::Heard(None));
}

#[test]
fn leases_with_a_former_peer_settle_from_the_first_period_on() {
    let mut shell = with_a_former_peer();
    assert_eq!(shell.node.former_peers(), [name("x")].into());
    shell.period(20);
    let warnings = |shell: &Shell| {
        shell.outputs.iter().filter(|output| matches!(output, Output::Warning(_))).count()
    };
    assert_eq!(warnings(&shell), 1);
    let recall = ("x".to_owned(), Message::MemLenFin { lease: LeaseId(2), generation: 0 });
    assert!(shell.sent().contains(&recall));
    let evacuate =
        Action::Evacuate { volume: VolumeId(3), lease: LEASE, onto: Vec::new(), spills: true };
    assert!(shell.begun().contains(&evacuate));
    let why = "no room".to_owned();
    let failed = Event::EvacuationFailed { lease: LEASE, unused: Vec::new(), why };
    shell.done(Work::Lease(LEASE), failed);
    for _ in 0..9 {
        assert!(!shell.period(20).begun().contains(&evacuate));
    }
    assert!(shell.period(20).begun().contains(&evacuate), "every ten periods");
    assert_eq!(warnings(&shell), 0, "the first warning was enough");
}

#[test]
fn a_repeated_fin_is_answered_once_the_memory_is_free() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    shell.hear("b", bor_fin(lease));
    assert!(shell.answers().is_empty());
    let first = shell.tickets;
    assert!(shell.hear("b", bor_fin(lease)).outputs.is_empty(), "it is being freed");
    let both = [first, first + 1].map(|ticket| (ticket, Answer::Heard(None)));
    assert_eq!(shell.freed(lease).answers(), both);
    assert_eq!(shell.hear("b", bor_fin(lease)).answer(), Answer::Heard(None), "it is free");
}

#[test]
fn memory_that_cannot_be_freed_is_freed_again_later() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    shell.hear("b", bor_fin(lease));
    let waits = shell.tickets;
    shell.input(Input::Done { work: Work::Lease(lease), event: None });
    assert!(shell.answers().is_empty());
    assert_eq!(shell.period(20).begun(), [Action::FreeLease { lease }]);
    assert!(shell.period(20).begun().is_empty(), "it is in progress");
    assert_eq!(shell.freed(lease).answers(), [(waits, Answer::Heard(None))]);
}

#[test]
fn the_fin_of_another_host_is_answered_at_once() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    assert_eq!(shell.hear("c", bor_fin(lease)).answer(), Answer::Heard(None));
    assert!(shell.begun().is_empty());
}

#[test]
fn a_message_in_flight_is_not_sent_again() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    let recall = Message::MemLenFin { lease, generation: 0 };
    assert_eq!(shell.drain(true).sent(), [("b".to_owned(), recall.clone())]);
    for _ in 0..3 {
        assert_eq!(shell.period(20).sent(), []);
    }
    shell.said("b", recall.clone(), Said::Lost);
    assert_eq!(shell.period(20).sent(), [("b".to_owned(), recall)]);
}

#[test]
fn a_refused_request_goes_to_the_next_lender() {
    let mut shell = Shell::new();
    shell.period(85);
    let sent = shell.offers(&[("b", 4), ("c", 3)]).sent();
    let [(to, message)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(to, "b");
    shell.said("b", message.clone(), Said::Refused("me is not a peer of b".to_owned()));
    assert_eq!(shell.sent()[0].0, "c");
}

#[test]
fn a_recall_waits_for_offers_and_hears_of_the_last_failure() {
    let mut shell = Shell::new();
    shell.swap();
    assert!(shell.hear("b", len_fin(1)).asks_offers() && shell.answers().is_empty());
    let request = shell.offers(&[("c", 4)]).sent();
    assert_eq!(shell.answer(), Answer::Heard(None));
    assert_eq!(request[0].0, "c", "the offers were there in time");
    let refused = Said::Refused("c is full".to_owned());
    assert!(matches!(
        shell.said("c", request[0].1.clone(), refused).begun()[..],
        [Action::Evacuate { lease: LEASE, .. }]
    ));
    let why = "no room".to_owned();
    let failed = Event::EvacuationFailed { lease: LEASE, unused: Vec::new(), why };
    shell.done(Work::Lease(LEASE), failed).hear("b", len_fin(1)).offers(&[]);
    assert_eq!(shell.answer(), Answer::Heard(Some("no room".to_owned())));
    let done = Event::Evacuated { lease: LEASE, unused: Vec::new() };
    assert_eq!(shell.done(Work::Lease(LEASE), done).sent(), [("b".to_owned(), bor_fin(LEASE))]);
    shell.hear("b", len_fin(1)).offers(&[]);
    assert_eq!(shell.answer(), Answer::Heard(None), "the failure is past");
}

#[test]
fn a_renewal_is_a_sign_of_life_and_names_what_is_gone() {
    let mut shell = Shell::new();
    let (of_b, of_c) = (shell.lend("b", 1), shell.lend("c", 2));
    let ticket = shell.ticket();
    let leases = vec![of_b, of_c, LeaseId(77)];
    let (from, generations) = (name("b"), BTreeMap::new());
    let renewal = Input::Renewal { from, leases, generations, io_timeout_ms: Some(8000), ticket };
    shell.after(60).input(renewal);
    assert_eq!(shell.answer(), Answer::Renewed(vec![of_c, LeaseId(77)]));
    let freed = shell.after(60).period(20).begun();
    assert!(freed.contains(&Action::FreeLease { lease: of_c }), "c was silent for the grace");
    assert!(!freed.contains(&Action::FreeLease { lease: of_b }));
    let left = shell.node.left(&Default::default(), &Default::default());
    let timeouts: Vec<_> = left.iter().map(|left| left.io_timeout_ms).collect();
    assert_eq!(timeouts, [Some(8000), None]);
}

#[test]
fn a_host_that_is_down_is_noted_with_the_leases_it_concerns() {
    let address = std::net::SocketAddr::from(([192, 0, 2, 2], 7070));
    let down = |shell: &mut Shell, host: &str| {
        shell.input(Input::HostDown { host: name(host), address });
        let [(EventKind::HostDown, what)] = &shell.notices()[..] else {
            panic!("{:?}", shell.outputs)
        };
        what.clone()
    };
    let mut borrower = Shell::new();
    borrower.swap();
    let what = down(&mut borrower, "b");
    let lease = LEASE;
    assert!(what.ends_with(&format!("pages of this host are there, in lease {lease}")), "{what}");
    let other = "c at 192.0.2.2:7070 answers no host, or stopped";
    assert_eq!(down(&mut borrower, "c"), other);

    let mut lender = Shell::new();
    let lease = lender.lend("b", 1);
    let what = down(&mut lender, "b");
    assert!(what.ends_with(&format!("pages of it are here, in lease {lease}")), "{what}");
}
