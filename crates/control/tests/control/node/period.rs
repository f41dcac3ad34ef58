//! Tests of a period's work besides Algorithm 1, and of the question for offers.

use std::collections::BTreeSet;
use std::time::Duration;

use aquifer_control::node::{
    EventKind, Found, Health, Input, LeaseReading, Output, Readings, VolumeReading, Work,
};
use aquifer_control::{
    Action, BorrowedLease, Cause, Event, LiveVolume, Memory, Message, Owner, RequestId,
};
use aquifer_page::{Bytes, Group, LeaseId, VolumeId};

use super::{LEASE, Shell, memory};
use crate::host::{bor_fin, len_fin, name};

fn found(found: Found) -> Readings {
    Readings { memory: memory(70), found: Some(found), ..Readings::default() }
}

/// Returns the leases that the next period wants to search for.
fn vacated(shell: &Shell) -> Option<Vec<(VolumeId, LeaseId)>> {
    shell.node.wanted(shell.now).vacated
}

/// Returns the lenders to renew at; `None` inside means all.
fn renewals(shell: &Shell) -> Vec<Option<usize>> {
    let renewal = |output: &Output| match output {
        Output::Renew { only } => Some(only.as_ref().map(|only| only.len())),
        _ => None,
    };
    shell.outputs.iter().filter_map(renewal).collect()
}

fn look(shell: &mut Shell, volume: VolumeId, health: Health) {
    let (lender, placed) = (name("b"), Bytes::mib(64));
    let lease = LeaseReading { lease: LEASE, lender, placed, health, copy: None };
    let (spilled, last_error) = (Bytes::ZERO, None);
    let reading =
        VolumeReading { volume, spilled, last_error, takes_copies: true, leases: vec![lease] };
    shell.input(Input::Volumes(vec![reading]));
}

#[test]
fn offers_are_asked_for_early_and_once_at_a_time() {
    let mut shell = Shell::new();
    assert!(!shell.period(72).asks_offers());
    assert!(shell.period(73).asks_offers(), "above 0.9 x T_upper");
    assert!(!shell.period(85).asks_offers(), "the answers are on their way");
    assert_eq!(shell.offers(&[("b", 4)]).sent().len(), 1, "decides on the last reading");
    let early = Memory { pressure: true, ..memory(20) };
    assert!(shell.read(Readings { memory: early, ..Readings::default() }).asks_offers());
}

#[test]
fn a_lender_asks_for_no_offers() {
    let mut shell = Shell::new();
    shell.lend("b", 1);
    assert!(!shell.period(90).asks_offers());
}

#[test]
fn renewals_come_at_each_eighth_of_the_grace() {
    let mut shell = Shell::new();
    assert_eq!(renewals(shell.period(20)), [None]);
    for _ in 0..9 {
        assert_eq!(renewals(shell.period(20)), []);
    }
    assert_eq!(renewals(shell.period(20)), [None], "after 10 s of 80 s");
    shell.swap();
    assert_eq!(renewals(shell.period(20)), [None]);
}

#[test]
fn a_missed_lender_hears_every_five_seconds() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    shell.period(20);
    look(&mut shell, volume, Health::Unreachable);
    assert_eq!(shell.notices()[0].0, EventKind::LenderLost);
    for _ in 0..4 {
        assert_eq!(renewals(shell.period(20)), []);
    }
    assert_eq!(renewals(shell.period(20)), [Some(1)]);
}

#[test]
fn a_lost_lease_is_noted_once() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    let renewed = || Input::Renewed { lender: name("b"), lost: vec![LEASE] };
    assert_eq!(shell.input(renewed()).notices()[0].0, EventKind::LeaseLost);
    assert!(shell.node.lost().contains(&LEASE));
    assert_eq!(shell.input(renewed()).notices(), []);
    look(&mut shell, volume, Health::Lost);
    assert_eq!(shell.notices(), [], "its lender has said so");
    shell.give_back(None).done(Work::Volume(volume), Event::Deactivated { volume });
    shell.input(renewed());
    assert!(shell.notices().is_empty() && shell.node.lost().is_empty(), "it is not held any more");
}

#[test]
fn volumes_are_looked_at_once_a_second_and_one_look_at_a_time() {
    let mut shell = Shell::new();
    let looks = |shell: &Shell| shell.outputs.contains(&Output::LookAtVolumes);
    assert!(looks(shell.period(20)));
    assert!(!looks(shell.period(20)), "the last look has not ended");
    shell.input(Input::Volumes(Vec::new()));
    assert!(looks(shell.period(20)));
    shell.input(Input::Volumes(Vec::new())).now += Duration::from_millis(500);
    assert!(!looks(shell.read(Readings { memory: memory(20), ..Readings::default() })));
}

#[test]
fn killed_programs_and_ended_vms_are_noted() {
    let mut shell = Shell::new();
    let reads = |oom_kills| Readings { memory: memory(20), oom_kills, ..Readings::default() };
    assert_eq!(shell.read(reads(Some(5))).notices(), [], "before this agent");
    assert_eq!(shell.read(reads(None)).notices(), []);
    let what = "the kernel killed 2 program(s) of host because memory ran out".to_owned();
    assert_eq!(shell.read(reads(Some(7))).notices(), [(EventKind::OomKill, what)]);
    let ended_vms = vec![("vm".to_owned(), "it was shut down".to_owned())];
    shell.read(Readings { ended_vms, ..reads(Some(7)) });
    assert_eq!(shell.notices(), [(EventKind::VmEnded, "it was shut down".to_owned())]);
}

#[test]
fn connections_are_signs_of_life_and_read_only_when_due() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    for _ in 0..20 {
        shell.after(9);
        let connected = shell.node.wanted(shell.now).connected.then(|| vec![lease]);
        shell.read(Readings { memory: memory(20), connected, ..Readings::default() });
        assert!(!shell.node.wanted(shell.now).connected);
        assert!(shell.begun().is_empty(), "b is alive");
    }
}

#[test]
fn silence_begins_when_the_lender_first_misses_its_borrower() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    let mut second = |is_connected: bool| {
        shell.after(1);
        let connected = shell.node.wanted(shell.now).connected;
        let connected = connected.then(|| is_connected.then_some(lease).into_iter().collect());
        shell.read(Readings { memory: memory(20), connected, ..Readings::default() });
        shell.begun().contains(&Action::FreeLease { lease })
    };
    // The last sign is up to an eighth of the grace older than the end of the connection.
    (0..19).for_each(|_| assert!(!second(true)));
    let silent_s = (1..).find(|_| second(false)).unwrap();
    assert!((81..=91).contains(&silent_s), "{silent_s} s, with a grace of 80 s");
}

#[test]
fn a_dead_volume_leaves_once() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    let dead = || found(Found { dead: vec![volume], ..Found::default() });
    assert_eq!(shell.read(dead()).begun(), [Action::Deactivate { volume }]);
    assert!(shell.read(dead()).begun().is_empty(), "it is leaving");
}

#[test]
fn a_lease_left_by_the_previous_agents_order_goes_back() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    let place = (volume, LEASE);
    assert_eq!(vacated(shell.after(1)), Some(vec![place]));
    shell.read(found(Found { vacated: vec![LEASE], ..Found::default() }));
    assert_eq!(shell.sent(), [("b".to_owned(), bor_fin(LEASE))]);
    assert_eq!(vacated(&shell), None, "once a second");
}

#[test]
fn a_lease_on_which_work_is_in_progress_is_not_searched_for() {
    let mut shell = Shell::new();
    shell.swap();
    shell.hear("b", len_fin(1)).offers(&[]);
    assert!(matches!(shell.begun()[..], [Action::Evacuate { lease: LEASE, .. }]));
    assert_eq!(vacated(shell.after(1)), Some(Vec::new()));
    shell.read(found(Found { vacated: vec![LEASE], ..Found::default() }));
    assert!(shell.sent().is_empty(), "the move began after the search");
}

/// Returns the region `items` of 1 GiB, with a lease of `b`.
fn region(lease: LeaseId, generation: u32) -> LiveVolume {
    LiveVolume {
        volume: VolumeId(5),
        bytes: Bytes::gib(1),
        owner: Owner::Region("items".parse().unwrap()),
        group: Group::default(),
        cause: Cause::ByHand,
        leases: vec![BorrowedLease {
            lease,
            lender: name("b"),
            bytes: Bytes::gib(1),
            uris: vec!["there".to_owned()],
            generation,
        }],
        copies: Vec::new(),
    }
}

#[test]
fn a_lender_that_asks_for_a_moved_lease_learns_its_host_at_once() {
    let mut shell = Shell::new();
    let arrived = Found { arrived: vec![region(LEASE, 1)], ..Found::default() };
    shell.after(1).read(found(arrived));
    assert_eq!(renewals(shell.period(20)), [None], "the region has come");
    assert_eq!(renewals(shell.period(20)), []);
    let (request, bytes) = (RequestId(1), Bytes::gib(1));
    let asked = |generation| {
        let uris = Vec::new();
        Message::MemBorAck { request, lease: LEASE, bytes, uris, generation }
    };
    shell.hear("b", asked(1));
    assert!(shell.sent().is_empty(), "it does not deny that it holds the lease");
    assert_eq!(renewals(shell.period(20)), [None]);
    assert_eq!(renewals(shell.period(20)), []);
}

#[test]
fn a_region_that_comes_back_unnoticed_has_its_new_leases() {
    let mut shell = Shell::new();
    for (lease, generation) in [(LEASE, 1), (LeaseId(2), 3)] {
        let (volume, leases) = (VolumeId(5), BTreeSet::from([lease]));
        shell.input(Input::Expect { volume, leases });
        let arrived = Found { arrived: vec![region(lease, generation)], ..Found::default() };
        shell.after(1).read(found(arrived));
    }
    let held = shell.node.controller().borrowed();
    let held: Vec<_> = held.iter().map(|it| (it.lease.lease, it.lease.generation)).collect();
    assert_eq!(held, [(LeaseId(2), 3)]);
    // It is no longer expected: a recall counts.
    let recall = Message::MemLenFin { lease: LeaseId(2), generation: 3 };
    shell.hear("b", recall).offers(&[("c", 4)]);
    assert_eq!(shell.sent()[0].0, "c", "asks for room elsewhere");
}
