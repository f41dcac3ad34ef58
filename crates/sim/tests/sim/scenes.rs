//! Scenes with known ends: borrowing and recalls, the times of copies, and a trace.

use std::time::Duration;

use aquifer_control::Role;
use aquifer_page::{Bytes, HostName};
use aquifer_sim::{
    Command, Costs, Load, Report, Scenario, Simulation, read_trace, synthetic_hosts,
};

const MEMORY: Bytes = Bytes::gib(4);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Returns hosts `a`, `b` and so on with constant demands in percent of their RAM.
fn hosts(percents: &[u64]) -> Scenario {
    let host = |(index, percent): (usize, &u64)| {
        let name: HostName = char::from(b'a' + index as u8).to_string().parse().unwrap();
        (name, Load::constant(MEMORY.scaled(*percent as f64 / 100.0)))
    };
    let hosts = percents.iter().enumerate().map(host).collect();
    Scenario::new(hosts, MEMORY, seconds(600), 1)
}

fn roles(simulation: &Simulation, hosts: usize) -> Vec<Role> {
    (0..hosts).map(|host| simulation.role(host)).collect()
}

#[test]
fn a_host_in_need_swaps_to_one_that_has_spare() {
    let mut simulation = Simulation::new(hosts(&[110, 20]));
    simulation.run_for(seconds(30)).unwrap();
    assert_eq!(roles(&simulation, 2), [Role::Borrower, Role::Lender]);
    // The kernel keeps 2 % of the RAM.
    let remote = simulation.remote(0);
    assert!((Bytes::mib(480)..Bytes::mib(500)).contains(&remote), "{remote}");
    assert_eq!(simulation.unmatched(), Vec::<String>::new());
    simulation.set_load(0, Load::constant(MEMORY.scaled(0.2)));
    simulation.run_for(seconds(30)).unwrap();
    assert_eq!(simulation.left(), Vec::<String>::new());
}

#[test]
fn leases_of_a_lender_in_need_move_to_another() {
    let mut simulation = Simulation::new(hosts(&[115, 20, 95]));
    simulation.run_for(seconds(30)).unwrap();
    assert_eq!(simulation.lenders(0), [("b".parse().unwrap(), 16)].into());
    simulation.set_load(2, Load::constant(MEMORY.scaled(0.2)));
    simulation.set_load(1, Load::constant(MEMORY.scaled(0.9)));
    simulation.run_for(seconds(60)).unwrap();
    let lenders: Vec<_> = simulation.lenders(0).into_keys().map(String::from).collect();
    assert_eq!(lenders, ["c"], "{:#?}", simulation.latest(1));
}

#[test]
fn an_order_replaces_leases_in_use_and_their_keys() {
    let mut simulation = Simulation::new(hosts(&[110, 20, 20]));
    simulation.run_for(seconds(30)).unwrap();
    let remote = simulation.remote(0);
    let before = simulation.lenders(0);
    simulation.order(0, Command::RotateKeys);
    simulation.run_for(seconds(60)).unwrap();
    let latest = simulation.latest(0);
    let has = |text: &str| latest.iter().any(|what| what.contains(text));
    assert!(has("its pages get a new key") && has("vacated lease"), "{latest:#?}");
    assert_eq!(simulation.remote(0), remote, "{before:?} {:?}", simulation.lenders(0));
    assert_eq!(simulation.unmatched(), Vec::<String>::new());
}

#[test]
fn a_drained_lender_has_its_memory_back() {
    let mut simulation = Simulation::new(hosts(&[110, 20, 79]));
    simulation.run_for(seconds(30)).unwrap();
    assert_eq!(roles(&simulation, 3), [Role::Borrower, Role::Lender, Role::Neutral]);
    simulation.set_load(2, Load::constant(MEMORY.scaled(0.3)));
    simulation.order(1, Command::Drain(true));
    simulation.run_for(seconds(30)).unwrap();
    assert_eq!(roles(&simulation, 3), [Role::Borrower, Role::Neutral, Role::Lender]);
}

#[test]
fn copies_take_time_by_the_bandwidth() {
    let back_s = |bandwidth| {
        let mut scenario = hosts(&[120, 20]);
        scenario.costs = Costs { bandwidth, ..Costs::default() };
        let mut simulation = Simulation::new(scenario);
        simulation.run_for(seconds(300)).unwrap();
        let remote = simulation.remote(0);
        assert!(remote > Bytes::mib(800), "{remote}");
        simulation.order(1, Command::Drain(true));
        (1..600).find(|_| {
            simulation.run_for(seconds(1)).unwrap();
            simulation.role(1) == Role::Neutral
        })
    };
    // 901 MiB at 8 MiB/s take 113 s.
    assert!(back_s(Bytes::gib(1)).is_some_and(|back_s| back_s < 10));
    assert!(back_s(Bytes::mib(8)).is_some_and(|back_s| (112..130).contains(&back_s)));
}

#[test]
fn demand_without_a_lender_waits_on_disk() {
    let report = Simulation::new(hosts(&[120, 120])).run().unwrap();
    // 22 % of both hosts.
    assert!((Bytes::mib(1790)..Bytes::mib(1810)).contains(&report.usage.on_disk.average));
    assert_eq!(report.usage.stranded.most, Bytes::ZERO, "no RAM is free");
    assert_eq!((report.usage.remote.most, report.counts.grants), (Bytes::ZERO, 0));
}

#[test]
fn ram_that_its_host_does_not_lend_is_stranded() {
    // 75 % used leaves less than an extent below T_upper for each of the others.
    let report = Simulation::new(hosts(&[120, 79, 79])).run().unwrap();
    assert_eq!(report.counts.grants, 0);
    assert!(report.usage.stranded.average > Bytes::mib(800), "{:?}", report.usage.stranded);
    assert!(report.usage.stranded_below_upper.most < Bytes::mib(90));
}

#[test]
fn a_trace_is_replayed() {
    let trace = "0,a,1G\n0,b,1G\n100,a,5G\n200,a,1G\n";
    let scenario = Scenario::new(read_trace(trace).unwrap(), MEMORY, seconds(300), 1);
    let mut simulation = Simulation::new(scenario);
    simulation.run_for(seconds(99)).unwrap();
    assert_eq!(roles(&simulation, 2), [Role::Neutral, Role::Neutral]);
    simulation.run_for(seconds(100)).unwrap();
    assert_eq!(roles(&simulation, 2), [Role::Borrower, Role::Lender]);
    simulation.run_for(seconds(100)).unwrap();
    assert_eq!(simulation.report().usage.demand.most, Bytes::gib(6));
    assert_eq!(simulation.report().role_changes.total, 4, "{:#?}", simulation.latest(0));
    assert_eq!(simulation.left(), Vec::<String>::new());
}

#[test]
fn without_faults_a_hundred_hosts_share_without_losses() {
    let loads = synthetic_hosts(100, Bytes::gib(64), 3).unwrap();
    let scenario = Scenario::new(loads, Bytes::gib(64), seconds(300), 3);
    let Report { counts, violations, usage, .. } = Simulation::new(scenario).run().unwrap();
    assert_eq!((violations, counts.lost_bytes, counts.network.lost_messages), (0, 0, 0));
    assert!(counts.grants > 10 && usage.remote.most > Bytes::gib(1), "{counts:?} {usage:?}");
}
