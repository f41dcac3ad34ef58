//! Tests of second copies: where they go, what is given up first, and lenders that are gone.

use std::collections::BTreeMap;

use aquifer_control::node::{
    CopyReading, Health, Input, LeaseReading, Output, Said, VolumeReading, Work,
};
use aquifer_control::{
    Action, Config, Event, Message, Offer, Owner, Protection, Protections, Restored, Subject,
};
use aquifer_page::{Bytes, LeaseId, VolumeId};

use super::{LEASE, Shell};
use crate::host::{ack, bor_fin, len_fin, name};

const VOLUME: VolumeId = VolumeId(5);
const COPY: LeaseId = LeaseId(2);

/// A node that keeps two copies. `b` has granted [`LEASE`] to a region.
fn with_a_region() -> Shell {
    with_a_region_of(Protections::all(Protection::Mirror))
}

fn with_a_region_of(protection: Protections) -> Shell {
    let config = Config { protection, ..crate::host::config() };
    let mut shell = Shell::with(Restored::default(), config);
    shell.input(Input::Peers(["b", "c", "d"].map(name).into()));
    shell.period(20).borrow_for().offers(&[("b", 1)]);
    assert_eq!(shell.granted(), VOLUME);
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    shell
}

/// Tells the node which of the two lenders answer; `None` if there is no second one.
fn look(shell: &mut Shell, first_answers: bool, answers: Option<bool>) {
    look_with(shell, first_answers, answers, Bytes::ZERO);
}

fn look_with(shell: &mut Shell, first_answers: bool, answers: Option<bool>, lacks: Bytes) {
    let copy = |answers| CopyReading {
        lease: COPY,
        first_answers,
        answers,
        lacks,
        first_lacks: Bytes::ZERO,
    };
    let alone = if first_answers { Health::Ok } else { Health::Unreachable };
    let lease = LeaseReading {
        lease: LEASE,
        lender: name("b"),
        placed: Bytes::mib(64),
        health: answers.map_or(alone, |_| Health::Ok),
        copy: answers.map(copy),
    };
    let reading = VolumeReading {
        volume: VOLUME,
        spilled: Bytes::ZERO,
        last_error: None,
        takes_copies: true,
        leases: vec![lease],
    };
    shell.input(Input::Volumes(vec![reading]));
}

/// Offers memory of lenders in zones.
fn offer(shell: &mut Shell, lenders: &[(&str, u64, &str)]) {
    let offer = |(host, gib, zone): &(&str, u64, &str)| Offer {
        zone: Some(zone.parse().unwrap()),
        ..Offer::new(name(host), Bytes::gib(*gib))
    };
    let lenders = lenders.iter().map(offer).collect();
    shell.input(Input::Offers { lenders, stored: BTreeMap::new() });
}

/// Runs periods, each with a look at the leases, until the node asks a lender. Peers offer this
/// memory.
fn until_it_asks(shell: &mut Shell, seen: (bool, Option<bool>), lenders: &[(&str, u64)]) {
    for _ in 0..100 {
        look(shell, seen.0, seen.1);
        if shell.period(20).asks_offers() {
            shell.offers(lenders);
        }
        if shell.sent().iter().any(|(_, sent)| matches!(sent, Message::MemBorReq { .. })) {
            return;
        }
    }
    panic!("it asks nobody: {:?}", shell.outputs);
}

/// Answers the request for a second copy with [`COPY`]. Returns the host that got the request.
fn grant(shell: &mut Shell) -> String {
    let (to, request) = shell.sent().pop().expect("a request");
    let Message::MemBorReq { request: id, bytes, ref owner, .. } = request else {
        panic!("{request:?}")
    };
    assert_eq!((bytes, owner), (Bytes::gib(1), &Owner::Region("items".parse().unwrap())));
    shell.said(&to, request, Said::Taken(None));
    shell.hear(&to, ack(id, COPY.0, bytes));
    to
}

/// A node whose region has its second copy at `c`.
fn with_a_copy() -> Shell {
    let mut shell = with_a_region();
    look(&mut shell, true, None);
    assert!(shell.period(20).asks_offers());
    shell.offers(&[("b", 9), ("c", 4)]);
    assert_eq!(grant(&mut shell), "c", "not the lender of the first copy");
    let [Action::Copy { volume: VOLUME, of: LEASE, onto }] = &shell.begun()[..] else {
        panic!("{:?}", shell.outputs)
    };
    assert_eq!(onto.lease, COPY);
    let region = Subject::Region("items".parse().unwrap());
    let tells = |output: &Output| {
        matches!(output, Output::Decision { what, about, .. }
            if what.contains("keeps second copies") && about.contains(&region))
    };
    assert!(shell.outputs.iter().any(tells), "{:?}", shell.outputs);
    shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed: None });
    look(&mut shell, true, Some(true));
    shell
}

fn says(shell: &Shell, text: &str) -> bool {
    shell
        .outputs
        .iter()
        .any(|output| matches!(output, Output::Decision { what, .. } if what.contains(text)))
}

#[test]
fn a_lease_gets_one_copy_and_counts_once() {
    let mut shell = with_a_copy();
    for _ in 0..100 {
        assert!(!shell.period(20).asks_offers(), "it has its copy");
        look(&mut shell, true, Some(true));
    }
    let volumes = shell.node.controller().volumes();
    assert_eq!(volumes[0].bytes, Bytes::gib(1), "copies are no room for pages");
    assert_eq!(shell.node.controller().borrowed().len(), 2);
}

#[test]
fn without_protection_nobody_is_asked() {
    let mut shell = Shell::new();
    shell.period(20).borrow_for().offers(&[("b", 1)]);
    shell.granted();
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    for _ in 0..100 {
        look(&mut shell, true, None);
        assert!(!shell.period(20).asks_offers());
    }
}

#[test]
fn another_zone_comes_first_even_with_less_room() {
    let mut shell = with_a_region();
    look(&mut shell, true, None);
    shell.period(20);
    offer(&mut shell, &[("b", 9, "rack-1"), ("c", 8, "rack-1"), ("d", 2, "rack-2")]);
    assert_eq!(grant(&mut shell), "d");
    let mut shell = with_a_region();
    look(&mut shell, true, None);
    shell.period(20);
    offer(&mut shell, &[("b", 9, "rack-1"), ("c", 8, "rack-1")]);
    assert_eq!(grant(&mut shell), "c", "another host of the zone is better than none");
}

#[test]
fn a_lack_is_told_once_and_ends_when_a_host_has_room() {
    let mut shell = with_a_region();
    let mut told = 0;
    for _ in 0..100 {
        look(&mut shell, true, None);
        if shell.period(20).asks_offers() {
            shell.offers(&[("b", 9)]);
            told += usize::from(says(&shell, "has one copy only of the pages in lease"));
        }
    }
    assert_eq!(told, 1);
    until_it_asks(&mut shell, (true, None), &[("c", 1)]);
    assert_eq!(grant(&mut shell), "c");
}

#[test]
fn a_smaller_lease_than_the_first_goes_back() {
    let mut shell = with_a_region();
    look(&mut shell, true, None);
    shell.period(20).offers(&[("c", 1)]);
    let (to, request) = shell.sent().pop().unwrap();
    let Message::MemBorReq { request: id, .. } = request else { panic!("{request:?}") };
    shell.said(&to, request, Said::Taken(None));
    shell.hear("c", ack(id, COPY.0, Bytes::mib(512)));
    assert!(!shell.begun().iter().any(|action| matches!(action, Action::Copy { .. })));
    assert!(shell.sent().contains(&("c".to_owned(), bor_fin(COPY))));
}

#[test]
fn a_copy_that_its_lender_recalls_goes_back_at_once() {
    let mut shell = with_a_copy();
    shell.hear("c", len_fin(COPY.0));
    // The recall of a first copy needs offers; the end of a second one needs nothing.
    if shell.asks_offers() {
        shell.offers(&[("d", 9)]);
    }
    let begun = shell.begun();
    let [Action::Evacuate { lease: COPY, onto, spills: false, .. }] = &begun[..] else {
        panic!("{begun:?}")
    };
    assert!(onto.is_empty(), "no memory replaces it first");
    shell.done(Work::Lease(COPY), Event::Evacuated { lease: COPY, unused: Vec::new() });
    assert!(shell.sent().contains(&("c".to_owned(), bor_fin(COPY))));
    // Then another host gets the copy.
    until_it_asks(&mut shell, (true, None), &[("b", 9), ("d", 2)]);
    assert_eq!(grant(&mut shell), "d");
}

#[test]
fn a_recall_waits_until_the_copy_has_begun() {
    let mut shell = with_a_region();
    look(&mut shell, true, None);
    shell.period(20).offers(&[("c", 4)]);
    grant(&mut shell);
    shell.hear("c", len_fin(COPY.0));
    if shell.asks_offers() {
        shell.offers(&[]);
    }
    assert!(shell.begun().is_empty(), "{:?}", shell.begun());
    shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed: None });
    assert!(matches!(shell.begun()[..], [Action::Evacuate { lease: COPY, .. }]));
}

#[test]
fn a_copy_that_cannot_begin_goes_back() {
    let mut shell = with_a_region();
    look(&mut shell, true, None);
    shell.period(20).offers(&[("c", 4)]);
    grant(&mut shell);
    let failed = Some("no route".to_owned());
    shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed });
    assert!(shell.sent().contains(&("c".to_owned(), bor_fin(COPY))));
    assert!(says(&shell, "no route"), "{:?}", shell.outputs);
}

#[test]
fn pages_of_a_lender_that_is_gone_move_elsewhere() {
    let mut shell = with_a_copy();
    for _ in 0..10 {
        look(&mut shell, false, Some(true));
        assert!(!shell.period(20).asks_offers(), "a restart takes seconds");
    }
    until_it_asks(&mut shell, (false, Some(true)), &[("d", 4)]);
    let (to, request) = shell.sent().pop().expect("a request for room");
    let Message::MemBorReq { request: id, bytes, .. } = request else { panic!("{request:?}") };
    shell.said(&to, request, Said::Taken(None));
    shell.hear(&to, ack(id, 3, bytes));
    let begun = shell.begun();
    let [Action::Evacuate { lease: LEASE, onto, .. }] = &begun[..] else { panic!("{begun:?}") };
    assert_eq!(onto[0].lease, LeaseId(3));
    shell.done(Work::Lease(LEASE), Event::Evacuated { lease: LEASE, unused: Vec::new() });
    assert!(shell.sent().contains(&("b".to_owned(), bor_fin(LEASE))));
}

#[test]
fn a_copy_of_a_lender_that_is_gone_ends_and_is_made_anew() {
    let mut shell = with_a_copy();
    let mut begun = Vec::new();
    for _ in 0..20 {
        look(&mut shell, true, Some(false));
        begun = shell.period(20).begun();
        if !begun.is_empty() {
            break;
        }
    }
    shell.offers(&[]);
    let [Action::Evacuate { lease: COPY, onto, .. }] = &begun[..] else { panic!("{begun:?}") };
    assert!(onto.is_empty());
    shell.done(Work::Lease(COPY), Event::Evacuated { lease: COPY, unused: Vec::new() });
    until_it_asks(&mut shell, (true, None), &[("d", 1)]);
    assert_eq!(grant(&mut shell), "d");
}

#[test]
fn a_copy_that_is_not_whole_does_not_replace_its_lender() {
    let mut shell = with_a_copy();
    for _ in 0..100 {
        look_with(&mut shell, false, Some(true), Bytes::mib(1));
        shell.period(20);
        assert!(shell.begun().is_empty() && shell.sent().is_empty(), "{:?}", shell.outputs);
    }
}

#[test]
fn a_copy_that_the_engine_does_not_use_goes_back() {
    let mut shell = with_a_copy();
    let mut begun = Vec::new();
    for _ in 0..20 {
        look(&mut shell, true, None);
        begun = shell.period(20).begun();
        if !begun.is_empty() {
            break;
        }
    }
    assert!(matches!(begun[..], [Action::Evacuate { lease: COPY, .. }]), "{begun:?}");
}

#[test]
fn pages_with_a_copy_do_not_go_to_the_disk() {
    let mut shell = with_a_copy();
    let mut tries = 0;
    for _ in 0..200 {
        look(&mut shell, false, Some(true));
        shell.period(20);
        if shell.asks_offers() {
            shell.offers(&[]);
        }
        for action in shell.begun() {
            if let Action::Evacuate { lease: LEASE, spills, .. } = action {
                assert!(!spills, "the second copy is better than a disk");
                let why = "no room".to_owned();
                let event = Event::EvacuationFailed { lease: LEASE, unused: Vec::new(), why };
                shell.done(Work::Lease(LEASE), event);
                tries += 1;
            }
        }
    }
    assert!((2..10).contains(&tries), "{tries}");
}

#[test]
fn pages_without_another_copy_wait_for_their_lender() {
    let mut shell = with_a_copy();
    for _ in 0..100 {
        look(&mut shell, false, Some(false));
        shell.period(20);
        assert!(shell.begun().is_empty() && shell.sent().is_empty(), "{:?}", shell.outputs);
    }
}

/// Returns whether the last request is for copies that go first.
fn goes_first(shell: &Shell) -> bool {
    match shell.sent().pop() {
        Some((_, Message::MemBorReq { goes_first, .. })) => goes_first,
        other => panic!("a request was expected, not {other:?}"),
    }
}

#[test]
fn opportunistic_copies_go_first_and_mandatory_ones_do_not() {
    for (protection, first) in [(Protection::Mirror, false), (Protection::Opportunistic, true)] {
        let mut shell = with_a_region_of(Protections::all(protection));
        look(&mut shell, true, None);
        assert!(shell.period(20).asks_offers());
        shell.offers(&[("c", 4)]);
        assert_eq!(goes_first(&shell), first, "{protection:?}");
    }
}

#[test]
fn opportunistic_copies_need_memory_that_nobody_needs() {
    let mut shell = with_a_region_of(Protections::all(Protection::Opportunistic));
    look(&mut shell, true, None);
    assert!(shell.period(20).asks_offers());
    let full = Offer { for_copies: Bytes::ZERO, ..Offer::new(name("c"), Bytes::gib(8)) };
    let lenders = vec![full, Offer::new(name("d"), Bytes::gib(1))];
    shell.input(Input::Offers { lenders, stored: BTreeMap::new() });
    assert_eq!(grant(&mut shell), "d");
}

#[test]
fn regions_without_protection_get_no_copy_beside_others() {
    let regions = [("items".parse().unwrap(), Protection::None)].into();
    let protection = Protections { regions, ..Protections::all(Protection::Mirror) };
    let mut shell = with_a_region_of(protection);
    for _ in 0..100 {
        look(&mut shell, true, None);
        assert!(!shell.period(20).asks_offers());
    }
}
