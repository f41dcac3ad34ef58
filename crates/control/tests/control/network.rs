//! Tests of several controllers on a network that loses, duplicates and reorders messages, on hosts
//! with crashing agents.

use std::time::Duration;

use aquifer_control::{Event, Role};
use aquifer_page::{Bytes, Group};
use proptest::prelude::*;

use crate::sim::{Load, Network, config};

/// One random event. Numbers are taken modulo the number of choices.
#[derive(Clone, Debug)]
enum Happening {
    Tick { host: usize, load: Load, heard_of: u8, millis: u64 },
    Deliver(usize),
    Lose(usize),
    Double(usize),
    FinishJob { host: usize, at: usize, well: bool },
    Crash { host: usize, jobs_happened: bool },
    Borrow { host: usize, extents: u64 },
    BorrowForRegion { host: usize, extents: u64, again: bool },
    RemoveRegions { host: usize },
    FinishMove { host: usize, at: usize },
    Return { host: usize },
    Drain { host: usize, on: bool },
    Part { host: usize, other: usize },
    SeeBorrowers { host: usize },
    MoveRegion { from: usize, at: usize, to: usize },
    GoOnMoving(usize),
    ForgetMoves { host: usize },
    Renew { host: usize },
}

fn load() -> impl Strategy<Value = Load> {
    (0..100u64, 0..=100u64, prop::bool::weighted(0.1)).prop_map(|(used, filled, pressure)| Load {
        used,
        filled,
        pressure,
    })
}

fn happening() -> impl Strategy<Value = Happening> {
    let host = 0..5usize;
    let at = 0..64usize;
    let tick = (host.clone(), load(), any::<u8>(), 0..3000u64);
    let job = (host.clone(), at.clone(), prop::bool::weighted(0.8));
    let moved = (host.clone(), at.clone());
    let parted = (host.clone(), host.clone());
    let left = (host.clone(), at.clone(), host.clone());
    let region = (host.clone(), 1..12u64, prop::bool::weighted(0.2));
    prop_oneof![
        6 => tick.prop_map(|(host, load, heard_of, millis)| {
            Happening::Tick { host, load, heard_of, millis }
        }),
        12 => at.clone().prop_map(Happening::Deliver),
        2 => at.clone().prop_map(Happening::Lose),
        2 => at.clone().prop_map(Happening::Double),
        8 => job.prop_map(|(host, at, well)| Happening::FinishJob { host, at, well }),
        1 => (host.clone(), any::<bool>()).prop_map(|(host, jobs_happened)| {
            Happening::Crash { host, jobs_happened }
        }),
        1 => (host.clone(), 1..12u64).prop_map(|(host, extents)| {
            Happening::Borrow { host, extents }
        }),
        1 => region.prop_map(|(host, extents, again)| {
            Happening::BorrowForRegion { host, extents, again }
        }),
        1 => host.clone().prop_map(|host| Happening::RemoveRegions { host }),
        1 => host.clone().prop_map(|host| Happening::Return { host }),
        1 => moved.prop_map(|(host, at)| Happening::FinishMove { host, at }),
        1 => (host.clone(), any::<bool>()).prop_map(|(host, on)| Happening::Drain { host, on }),
        1 => parted.prop_map(|(host, other)| Happening::Part { host, other }),
        1 => host.clone().prop_map(|host| Happening::SeeBorrowers { host }),
        2 => left.prop_map(|(from, at, to)| Happening::MoveRegion { from, at, to }),
        4 => at.prop_map(Happening::GoOnMoving),
        1 => host.clone().prop_map(|host| Happening::ForgetMoves { host }),
        2 => host.prop_map(|host| Happening::Renew { host }),
    ]
}

fn happen(network: &mut Network, happening: Happening) {
    let hosts = network.hosts.len();
    match happening {
        Happening::Tick { host, load, heard_of, millis } => {
            network.advance(Duration::from_millis(millis));
            network.tick(host % hosts, load, heard_of);
        }
        Happening::Deliver(at) => network.deliver(at),
        Happening::Lose(at) => network.lose(at),
        Happening::Double(at) => network.double(at),
        Happening::FinishJob { host, at, well } => network.finish_job(host % hosts, at, well),
        Happening::Crash { host, jobs_happened } => network.crash(host % hosts, jobs_happened),
        Happening::Borrow { host, extents } => {
            let event = Event::Borrow { bytes: Bytes::mib(64 * extents), group: Group::default() };
            network.step(host % hosts, event);
        }
        Happening::BorrowForRegion { host, extents, again } => {
            network.borrow_for_region(host % hosts, extents, again);
        }
        Happening::RemoveRegions { host } => network.remove_regions(host % hosts),
        Happening::FinishMove { host, at } => network.finish_move(host % hosts, at),
        Happening::Drain { host, on } => network.step(host % hosts, Event::Drain { on }),
        Happening::Part { host, other } => {
            let host_name = network.hosts[other % hosts].name.clone();
            network.step(host % hosts, Event::Part { host: host_name });
        }
        Happening::Return { host } => network.step(host % hosts, Event::Return { volume: None }),
        Happening::SeeBorrowers { host } => network.see_borrowers(host % hosts),
        Happening::MoveRegion { from, at, to } => {
            network.begin_region_move(from % hosts, at, to % hosts);
        }
        Happening::GoOnMoving(at) => network.go_on_moving(at),
        Happening::ForgetMoves { host } => network.forget_moves(host % hosts),
        Happening::Renew { host } => network.renew(host % hosts),
    }
}

/// Removes the load and the regions, returns the volumes borrowed by hand, and heals the network.
/// Returns whether all hosts came to rest.
fn comes_to_rest(network: &mut Network, seconds: usize) -> bool {
    let idle = vec![Load { used: 10, ..Load::default() }; network.hosts.len()];
    network.settle();
    network.conclude_moves();
    for host in 0..network.hosts.len() {
        network.step(host, Event::Drain { on: false });
        network.step(host, Event::Return { volume: None });
    }
    for _ in 0..seconds {
        (0..network.hosts.len()).for_each(|host| network.remove_regions(host));
        network.healthy_second(&idle);
        if network.at_rest() {
            return true;
        }
    }
    false
}

const GRACE: u64 = 10_000;

/// So small that one lender seldom has the full size of a request.
const SMALL: Bytes = Bytes::gib(1);
const LARGE: Bytes = Bytes::gib(4);

/// Returns the number of cases: few by default; `PROPTEST_CASES=10000` is a long search.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(150)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        max_shrink_iters: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// [`Network`] checks the invariants at each step.
    #[test]
    fn no_lease_is_freed_in_use_and_all_are_freed_in_the_end(
        hosts in 2..=5usize,
        happenings in prop::collection::vec(happening(), 0..300),
    ) {
        let mut network = Network::new(hosts, SMALL, config(GRACE));
        happenings.into_iter().for_each(|happening| happen(&mut network, happening));
        // State lost in a crash may surface only when the lender asks, a quarter of the grace
        // later.
        if !comes_to_rest(&mut network, 60) {
            network.advance(Duration::from_secs(GRACE / 4));
            prop_assert!(comes_to_rest(&mut network, 60), "{:#?}", network.decisions);
        }
        prop_assert!(!network.any_expired(), "{:#?}", network.decisions);
    }

    #[test]
    fn without_crashes_all_leases_are_freed_within_seconds(
        hosts in 2..=5usize,
        happenings in prop::collection::vec(happening(), 0..300),
    ) {
        let mut network = Network::new(hosts, SMALL, config(GRACE));
        let is_calm = |happening: &Happening| !matches!(happening, Happening::Crash { .. });
        let calm = happenings.into_iter().filter(is_calm);
        calm.for_each(|happening| happen(&mut network, happening));
        prop_assert!(comes_to_rest(&mut network, 30), "{:#?}", network.decisions);
    }

    #[test]
    fn under_a_short_grace_only_expired_leases_are_lost(
        hosts in 2..=5usize,
        happenings in prop::collection::vec(happening(), 0..300),
    ) {
        let mut network = Network::new(hosts, SMALL, config(20));
        happenings.into_iter().for_each(|happening| happen(&mut network, happening));
        prop_assert!(comes_to_rest(&mut network, 120), "{:#?}", network.decisions);
        prop_assert!(!network.unexpired_leases_in_use());
    }
}

fn used(used: u64) -> Load {
    Load { used, ..Load::default() }
}

fn seconds(network: &mut Network, count: usize, loads: &[Load]) {
    (0..count).for_each(|_| network.healthy_second(loads));
}

fn roles(network: &Network) -> Vec<Role> {
    network.hosts.iter().map(|host| host.controller.role()).collect()
}

#[test]
fn two_hosts_borrow_and_lend_and_then_switch_roles() {
    let mut network = Network::new(2, LARGE, config(GRACE));
    seconds(&mut network, 3, &[used(85), used(20)]);
    assert_eq!(roles(&network), [Role::Borrower, Role::Lender]);
    seconds(&mut network, 3, &[used(20), used(20)]);
    assert_eq!(roles(&network), [Role::Neutral, Role::Neutral]);
    seconds(&mut network, 10, &[used(20), used(85)]);
    assert_eq!(roles(&network), [Role::Lender, Role::Borrower]);
    let expected = [Role::Neutral, Role::Borrower, Role::Neutral, Role::Lender];
    assert_eq!(network.hosts[0].roles, expected);
}

#[test]
fn one_volume_spans_the_leases_of_several_lenders() {
    let mut network = Network::new(3, LARGE, config(GRACE));
    // 72 % of 4 GiB leave 327 MiB below T_upper (5 extents), 70 % leave 409 MiB (6 extents). The
    // request is 8 extents.
    seconds(&mut network, 2, &[used(85), used(72), used(70)]);
    assert_eq!(roles(&network), [Role::Borrower, Role::Lender, Role::Lender]);
    let borrowed = network.hosts[0].controller.borrowed();
    let extents = |lender: &str| {
        let lease = borrowed.iter().find(|status| status.lease.lender.as_str() == lender).unwrap();
        lease.lease.bytes.extents()
    };
    assert_eq!((extents("c"), extents("b")), (6, 2), "most spare first");
    assert_eq!(network.hosts[0].volumes.len(), 1);
    assert_eq!(network.hosts[0].controller.volumes()[0].bytes, Bytes::mib(512));
}

#[test]
fn a_lender_serves_borrowers_until_its_spare_is_promised() {
    let mut network = Network::new(4, LARGE, config(GRACE));
    // 50 % of 4 GiB leave 1228 MiB below T_upper: two requests of 512 MiB, and three extents of the
    // third.
    seconds(&mut network, 2, &[used(90), used(90), used(90), used(50)]);
    let lent = network.hosts[3].controller.lent();
    let mut extents: Vec<_> = lent.iter().map(|loan| loan.lease.bytes.extents()).collect();
    extents.sort_unstable();
    assert_eq!(extents, [3, 8, 8]);
    assert_eq!(network.hosts[3].controller.spare().extents(), 1, "less than an extent is left");
}

#[test]
fn the_leases_of_a_lender_in_need_move_to_another_lender() {
    let mut network = Network::new(3, LARGE, config(GRACE));
    seconds(&mut network, 3, &[used(85), used(20), used(40)]);
    assert_eq!(roles(&network), [Role::Borrower, Role::Lender, Role::Neutral]);
    let need = Load { used: 90, filled: 50, pressure: false };
    seconds(&mut network, 4, &[used(85), need, used(40)]);
    assert_eq!(roles(&network)[2], Role::Lender);
    let volume = network.hosts[0].volumes.values().next().unwrap();
    assert!(volume.leases.iter().all(|lease| lease.lender.as_str() == "c"), "{volume:?}");
    assert!(network.hosts[1].store.is_empty());
    let expected = [Role::Neutral, Role::Lender, Role::Neutral, Role::Borrower];
    assert_eq!(network.hosts[1].roles, expected, "what it had left was not enough, so it borrows");
}

#[test]
fn a_fully_spilled_volume_goes_back_after_the_load() {
    let mut network = Network::new(2, LARGE, config(GRACE));
    seconds(&mut network, 2, &[used(85), used(20)]);
    seconds(&mut network, 3, &[used(85), used(90)]);
    assert_eq!(roles(&network), [Role::Borrower, Role::Neutral]);
    assert!(network.hosts[0].controller.borrowed().is_empty());
    seconds(&mut network, 2, &[used(20), used(90)]);
    let expected = [Role::Neutral, Role::Borrower, Role::Neutral, Role::Lender];
    assert_eq!(network.hosts[0].roles, expected, "and now it can help the other");
}

#[test]
fn hosts_that_ask_each_other_reject_and_can_ask_again() {
    let mut network = Network::new(2, LARGE, config(GRACE));
    let borrow = Event::Borrow { bytes: Bytes::mib(64), group: Group::default() };
    seconds(&mut network, 2, &[used(50), used(50)]);
    network.step(0, borrow.clone());
    network.step(1, borrow.clone());
    network.settle();
    assert_eq!(roles(&network), [Role::Neutral, Role::Neutral]);
    network.step(1, borrow);
    network.settle();
    assert_eq!(roles(&network), [Role::Lender, Role::Borrower]);
}

#[test]
fn an_operators_volume_stays_until_the_operator_returns_it() {
    let mut network = Network::new(2, LARGE, config(GRACE));
    let idle = [used(20), used(20)];
    seconds(&mut network, 2, &idle);
    network.step(0, Event::Borrow { bytes: Bytes::mib(100), group: Group::default() });
    network.settle();
    seconds(&mut network, 100, &idle);
    assert_eq!(roles(&network), [Role::Borrower, Role::Lender]);
    assert_eq!(network.hosts[0].controller.volumes()[0].bytes, Bytes::mib(128), "whole extents");
    network.step(0, Event::Return { volume: None });
    network.settle();
    assert!(network.at_rest());
}

#[test]
fn a_borrower_that_answers_does_not_expire() {
    let mut network = Network::new(2, LARGE, config(40));
    seconds(&mut network, 200, &[used(85), used(20)]);
    assert_eq!(roles(&network), [Role::Borrower, Role::Lender]);
    assert!(!network.any_expired());
}

#[test]
fn a_vanished_borrowers_lease_is_freed_after_the_grace() {
    let mut network = Network::new(2, LARGE, config(40));
    seconds(&mut network, 2, &[used(85), used(20)]);
    for second in 0..40 {
        assert_eq!(network.hosts[1].store.len(), 1, "after {second} s");
        network.advance(Duration::from_secs(1));
        network.tick(1, used(20), 0);
    }
    network.finish_job(1, 0, true);
    assert!(network.hosts[1].store.is_empty());
    assert_eq!(network.hosts[1].controller.role(), Role::Neutral);
}

#[test]
fn a_drained_lender_has_all_back_and_lends_again_only_when_told() {
    let mut network = Network::new(3, LARGE, config(GRACE));
    seconds(&mut network, 3, &[used(85), used(20), used(40)]);
    assert_eq!(network.hosts[1].store.len(), 1);
    network.step(1, Event::Drain { on: true });
    seconds(&mut network, 3, &[used(85), used(20), used(40)]);
    assert!(network.hosts[1].store.is_empty());
    let volume = network.hosts[0].volumes.values().next().unwrap();
    assert!(volume.leases.iter().all(|lease| lease.lender.as_str() == "c"), "{volume:?}");
    assert_eq!(network.hosts[1].controller.spare(), Bytes::ZERO);
    network.step(1, Event::Drain { on: false });
    assert!(network.hosts[1].controller.spare() > Bytes::ZERO);
}

#[test]
fn a_move_outlives_the_agent_and_the_next_finds_it_done() {
    let mut network = Network::new(3, LARGE, config(GRACE));
    seconds(&mut network, 3, &[used(85), used(20), used(40)]);
    network.step(1, Event::Drain { on: true });
    network.deliver(0);
    network.crash(0, true);
    assert_eq!(
        network.hosts[0].volumes.values().next().unwrap().leases.len(),
        1,
        "the move goes on"
    );
    seconds(&mut network, 3, &[used(85), used(20), used(40)]);
    assert!(network.hosts[1].store.is_empty(), "{:#?}", network.decisions);
}

#[test]
fn both_agents_may_crash_while_a_lease_is_left() {
    let mut network = Network::new(2, LARGE, config(GRACE));
    seconds(&mut network, 3, &[used(85), used(20)]);
    network.step(1, Event::Drain { on: true });
    network.deliver(0);
    network.crash(0, true);
    network.finish_move(0, 0);
    network.crash(1, false);
    // The lender has forgotten its recall, and the volume no longer uses the lease.
    seconds(&mut network, 3, &[used(85), used(20)]);
    assert!(network.hosts[1].store.is_empty(), "{:#?}", network.decisions);
}

#[test]
fn hosts_that_part_leave_each_other_in_either_role() {
    for (parts, other) in [(0, "b"), (1, "a")] {
        let mut network = Network::new(3, LARGE, config(GRACE));
        seconds(&mut network, 3, &[used(85), used(20), used(40)]);
        network.step(parts, Event::Part { host: other.parse().unwrap() });
        seconds(&mut network, 3, &[used(85), used(20), used(40)]);
        assert!(network.hosts[1].store.is_empty(), "{:#?}", network.decisions);
        assert_eq!(network.hosts[0].volumes.len(), 1);
    }
}
