//! VMs that move: away from overloaded hosts and from hosts that drain, never twice within ten
//! minutes for overload, and never onto a host without room.

use std::time::Duration;

use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_sim::{
    Backing, Command, Faults, Load, Scenario, Simulation, VmSpec, synthetic_hosts, synthetic_vms,
};

const MEMORY: Bytes = Bytes::gib(16);
const MINUTE: Duration = Duration::from_secs(60);

/// Returns a VM of this many GiB that uses all of its memory.
fn vm(name: &str, gib: u64, backing: Backing) -> VmSpec {
    let size = Bytes::gib(gib);
    let name = name.parse().unwrap();
    VmSpec { name, size, cache: size, backing, load: Load::constant(size), dirty: 1.0 }
}

/// Returns hosts `a`, `b` and so on of 16 GiB, whose programs use this many GiB, with VMs.
fn scenario<const N: usize>(hosts: [(u64, Vec<VmSpec>); N]) -> Scenario {
    let name = |index| char::from(b'a' + index as u8).to_string().parse::<HostName>().unwrap();
    let (programs, vms): (Vec<_>, Vec<_>) = hosts.into_iter().unzip();
    let loads = programs.iter().enumerate();
    let hosts = loads.map(|(index, gib)| (name(index), Load::constant(Bytes::gib(*gib))));
    let scenario = Scenario::new(hosts.collect(), MEMORY, 30 * MINUTE, 1);
    Scenario { vms, ..scenario }
}

fn names(simulation: &Simulation, host: usize) -> Vec<String> {
    simulation.vms(host).iter().map(RegionName::to_string).collect()
}

#[test]
fn a_vm_leaves_a_host_that_stays_overloaded() {
    let vms = vec![vm("big", 4, Backing::Outside), vm("small", 2, Backing::Outside)];
    // 14 of 16 GiB are used, and 12.8 is the threshold: either VM suffices.
    let mut simulation = Simulation::new(scenario([(8, vms), (2, vec![])]));
    simulation.run_for(4 * MINUTE).unwrap();
    assert_eq!(names(&simulation, 0), ["big", "small"], "the overload is still short");
    simulation.run_for(2 * MINUTE).unwrap();
    assert_eq!(
        (names(&simulation, 0), names(&simulation, 1)),
        (vec!["big".into()], vec!["small".into()])
    );
    let moves = simulation.report().vms;
    assert_eq!((moves.for_overload, moves.for_drains, moves.failed), (1, 0, 0));
}

#[test]
fn no_vm_moves_if_moves_are_off_or_its_memory_is_local() {
    let scene = |backing| scenario([(8, vec![vm("one", 6, backing)]), (2, vec![])]);
    let off = Scenario { move_after: None, ..scene(Backing::Outside) };
    for scenario in [off, scene(Backing::Local)] {
        let report = Simulation::new(scenario).run().unwrap();
        assert_eq!(report.vms.for_overload, 0);
        assert!(report.overloaded_s > 1700.0, "{}", report.overloaded_s);
    }
    let report = Simulation::new(scene(Backing::Outside)).run().unwrap();
    assert_eq!(report.vms.for_overload, 1);
    assert!((300.0..330.0).contains(&report.overloaded_s), "{}", report.overloaded_s);
}

#[test]
fn no_vm_moves_to_a_host_without_room_for_its_promise() {
    // The cache may take 6 GiB, and b uses up to 9.6 GiB for VMs that come because of overload.
    let vms = vec![vm("one", 6, Backing::Outside)];
    let report = Simulation::new(scenario([(8, vms), (4, vec![])])).run().unwrap();
    assert_eq!((report.vms.for_overload, report.vms.failed), (0, 0));
    assert!((1..10).contains(&report.vms.refused), "{}", report.vms.refused);
}

#[test]
fn of_two_vms_that_come_at_once_only_one_gets_the_room() {
    // The caches may take 6 GiB each, and c has 10.8 GiB below T_upper.
    let one = |name| vec![vm(name, 6, Backing::Outside)];
    let mut simulation = Simulation::new(scenario([(2, one("x")), (2, one("y")), (2, vec![])]));
    simulation.run_for(MINUTE).unwrap();
    simulation.order(0, Command::Vacate(true));
    simulation.order(1, Command::Vacate(true));
    simulation.run_for(5 * MINUTE).unwrap();
    assert_eq!(names(&simulation, 2).len(), 1, "{:#?}", simulation.latest(2));
    assert!(simulation.report().vms.refused > 0);
}

#[test]
fn a_vm_that_overloads_each_host_moves_seldom() {
    // Each host is overloaded with the VM once the VM grows, and none is without it.
    let mut one = vm("one", 5, Backing::Outside);
    one.load = Load::constant(Bytes::gib(1));
    let hosts = [(4, vec![one]), (4, vec![]), (4, vec![])];
    let mut simulation = Simulation::new(scenario(hosts));
    simulation.run_for(MINUTE).unwrap();
    (0..3).for_each(|host| simulation.set_load(host, Load::constant(Bytes::gib(10))));
    simulation.set_vm_load(&"one".parse().unwrap(), Load::constant(Bytes::gib(5)));
    for _ in 0..60 {
        // The hosts without the VM seem to have room.
        for host in 0..3 {
            let gib = if simulation.vms(host).is_empty() { 4 } else { 10 };
            simulation.set_load(host, Load::constant(Bytes::gib(gib)));
        }
        simulation.run_for(MINUTE).unwrap();
    }
    let moves = simulation.report().vms;
    assert!((3..=6).contains(&moves.for_overload), "{moves:?}");
    assert!(moves.shortest_s >= Some(600.0), "{moves:?}");
}

#[test]
fn a_drain_empties_a_host_and_its_end_lets_vms_come() {
    let vms = (0..4).map(|number| vm(&format!("vm{number}"), 1, Backing::Outside)).collect();
    let local = vec![vm("local", 1, Backing::Local)];
    let mut simulation = Simulation::new(scenario([(2, vms), (2, local), (2, vec![])]));
    simulation.run_for(MINUTE).unwrap();
    simulation.order(0, Command::Vacate(true));
    simulation.run_for(MINUTE).unwrap();
    assert_eq!(names(&simulation, 0), Vec::<String>::new(), "{:#?}", simulation.latest(0));
    assert_eq!(simulation.report().vms.for_drains, 4);
    simulation.order(1, Command::Vacate(true));
    simulation.order(2, Command::Vacate(true));
    simulation.run_for(MINUTE).unwrap();
    assert_eq!(names(&simulation, 0), Vec::<String>::new(), "all hosts drain");
    simulation.order(0, Command::Vacate(false));
    simulation.run_for(3 * MINUTE).unwrap();
    assert_eq!(names(&simulation, 0).len(), 4, "{:#?}", simulation.latest(1));
    assert_eq!(names(&simulation, 1), ["local"]);
}

#[test]
fn a_move_takes_the_time_of_its_copy() {
    let vms = vec![vm("one", 4, Backing::Outside)];
    let mut scenario = scenario([(2, vms), (2, vec![])]);
    scenario.costs.bandwidth = Bytes::mib(64);
    let mut simulation = Simulation::new(scenario);
    simulation.run_for(MINUTE).unwrap();
    simulation.order(0, Command::Vacate(true));
    let moved_s = (1..120).find(|_| {
        simulation.run_for(Duration::from_secs(1)).unwrap();
        !simulation.vms(1).is_empty()
    });
    // 4 GiB at 64 MiB/s take 64 s.
    assert!(moved_s.is_some_and(|moved_s| (63..70).contains(&moved_s)), "{moved_s:?}");
}

#[test]
fn under_swinging_load_and_drains_no_vm_oscillates() {
    let mut moves = 0;
    for seed in 0..6 {
        let loads = synthetic_hosts(12, MEMORY, seed).unwrap();
        let scenario = Scenario::new(loads, MEMORY, 60 * MINUTE, seed);
        let vms = synthetic_vms(12, 4, Bytes::gib(1), seed).unwrap();
        let faults = Faults { drains: 3.0, ..Faults::default() };
        let report = Simulation::new(Scenario { vms, faults, ..scenario }).run().unwrap();
        assert_eq!((report.vms.total, report.violations), (48, 0));
        assert!(report.vms.shortest_s.is_none_or(|apart| apart >= 600.0), "{:?}", report.vms);
        moves += report.vms.for_overload;
    }
    assert!(moves > 0, "some host must stay overloaded");
}

#[test]
fn a_vm_asks_only_hosts_that_take_it_to_use_its_leases() {
    let loads = synthetic_hosts(40, MEMORY, 0).unwrap();
    let scenario = Scenario::new(loads, MEMORY, 60 * MINUTE, 0);
    let vms = synthetic_vms(40, 4, Bytes::gib(1), 0).unwrap();
    let faults = Faults { drains: 1.0, ..Faults::default() };
    let moves = Simulation::new(Scenario { vms, faults, ..scenario }).run().unwrap().vms;
    assert!(moves.refused > 100 && moves.leases > 20, "{moves:?}");
    // Moves that fail leave a host behind. A VM that asked also hosts without room for it, and its
    // lenders, left 12.
    assert!((1..=4).contains(&moves.most_permitted), "{moves:?}");
}
