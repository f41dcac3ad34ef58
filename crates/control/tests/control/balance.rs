//! Tests of the balancer by sequences of readings: which VM grows, which gives, and when none
//! moves.

use aquifer_control::balance::{Balancer, Config, Host, Limits, Why};
use aquifer_page::Bytes;

use crate::vms::{Machine, SECTION, Vm, decision, limits, said};

fn machine(budget: u64, vms: impl IntoIterator<Item = (&'static str, Vm)>) -> Machine {
    Machine::new(Config::default(), budget, vms)
}

fn limited(vm: Vm, min: u64, max: u64, weight: u32) -> Vm {
    Vm { limits: Limits { min: Bytes::mib(min), max: Bytes::mib(max), weight, ..limits() }, ..vm }
}

#[test]
fn a_guest_without_slack_grows_by_sections_rounded_up() {
    // 1000 MiB and a quarter are 226 MiB above its size.
    let mut machine = machine(4096, [("a", Vm::new(1024, 1000)), ("b", Vm::new(2048, 100))]);
    assert_eq!(said(&machine.periods(1)), ["a 1024>1280 Tight"]);
    assert_eq!(said(&machine.periods(30)), [""; 0]);
}

#[test]
fn free_sections_are_used_before_any_vm_is_touched() {
    let mut machine = machine(8192, [("a", Vm::new(1024, 900)), ("b", Vm::new(4096, 100))]);
    machine.periods(20);
    machine.vm("a").load = 2000;
    machine.periods(20);
    assert_eq!((machine.size("a"), machine.size("b")), (2560, 4096));
}

#[test]
fn memory_reserved_by_the_guests_kernel_counts_as_need() {
    let mut machine = machine(4096, [("a", Vm { kept: 200, ..Vm::new(1024, 800) })]);
    assert_eq!(said(&machine.periods(1)), ["a 1024>1280 Tight"]);
    assert_eq!(machine.periods(10), []);
    assert_eq!(decision(&machine.look(), "a").need, Bytes::mib(1200));
}

#[test]
fn a_surplus_is_taken_only_when_it_has_lasted() {
    let mut machine = machine(
        5120,
        [("a", Vm::new(1024, 700)), ("b", limited(Vm::new(4096, 3800), 64, 4096, 100))],
    );
    machine.periods(10);
    machine.vm("b").load = 1000;
    machine.vm("a").load = 900;
    for period in 1..5 {
        let plan = machine.period();
        assert_eq!(plan.moves, [], "{period}");
        let why = decision(&plan, "b").why;
        let Why::Lasts { periods, of: 5, .. } = why else { panic!("{plan:?}") };
        assert_eq!(periods, period);
    }
    assert_eq!(said(&machine.periods(1)), ["b 4096>3968 Surplus", "a 1024>1152 Slack waits"]);
}

#[test]
fn for_a_guest_that_swaps_a_surplus_is_taken_at_once() {
    let mut machine = machine(5120, [("a", Vm::new(1024, 700)), ("b", Vm::new(4096, 3200))]);
    machine.periods(10);
    machine.vm("b").load = 1000;
    machine.vm("a").load = 1500;
    // 1500 MiB and a quarter are 851 MiB above its size.
    assert_eq!(said(&machine.periods(1)), ["b 4096>3200 Surplus", "a 1024>1920 Swaps waits"]);
}

#[test]
fn a_guest_with_rising_use_grows_before_it_is_short() {
    let mut machine = machine(2048, [("a", Vm::new(768, 100)), ("b", Vm::new(1280, 100))]);
    machine.periods(10);
    for load in [200, 300, 400] {
        machine.vm("a").load = load;
        let plan = machine.period();
        assert!(plan.moves.iter().all(|is| is.vm.as_str() == "b"), "{:?}", said(&plan.moves));
    }
    // 500 MiB and four times the rise of 100 MiB exceed 768 MiB, so others give at once.
    machine.vm("a").load = 500;
    let moves = said(&machine.periods(1));
    assert!(moves.iter().any(|is| is.starts_with("a 768>1024 Rises")), "{moves:?}");
    assert_eq!(machine.vm("a").swapping(), 0);
}

#[test]
fn a_stalled_guest_gets_surplus_at_once_section_by_section() {
    let mut machine = machine(5120, [("a", Vm::new(2048, 700)), ("b", Vm::new(3072, 1000))]);
    machine.vm("a").pressure = Some(40.0);
    assert_eq!(said(&machine.periods(1)), ["b 3072>2944 Surplus", "a 2048>2176 Pressure waits"]);
    machine.vm("a").pressure = Some(41.0);
    assert_eq!(said(&machine.periods(1)), ["b 2944>2816 Surplus", "a 2176>2304 Pressure waits"]);
    // The average falls: growth has helped, and the rest reflects the time before the growth.
    machine.vm("a").pressure = Some(30.0);
    assert_eq!(said(&machine.periods(1)), [""; 0]);
}

#[test]
fn a_vm_that_grew_gives_nothing_for_a_while() {
    let mut machine = machine(4096, [("a", Vm::new(1024, 700)), ("b", Vm::new(1024, 700))]);
    machine.vm("b").load = 2200;
    machine.periods(1);
    assert_eq!(machine.size("b"), 2816);
    machine.vm("b").load = 300;
    machine.vm("a").load = 1500;
    // Free memory goes to `a` at once. The memory that `b` just got stays with it for ten periods.
    assert_eq!(said(&machine.periods(10)), ["a 1024>1280 Swaps"]);
    assert_eq!(said(&machine.periods(1)), ["b 2816>2176 Surplus", "a 1280>1920 Tight waits"]);
}

#[test]
fn the_largest_surplus_by_weight_is_taken_first() {
    let vms = || {
        [
            ("a", Vm::new(1024, 700)),
            ("b", limited(Vm::new(4096, 500), 64, 8192, 300)),
            ("c", limited(Vm::new(2560, 500), 64, 8192, 100)),
        ]
    };
    let mut by_weight = machine(7808, vms());
    by_weight.periods(10);
    by_weight.vm("a").load = 1900;
    assert_eq!(said(&by_weight.periods(1)), ["c 2560>1280 Surplus", "a 1024>2432 Swaps waits"]);
    let mut weightless = machine(7808, vms());
    weightless.vm("b").limits.weight = 0;
    weightless.periods(10);
    weightless.vm("a").load = 1900;
    assert_eq!(said(&weightless.periods(1)), ["b 4096>2816 Surplus", "a 1024>2432 Swaps waits"]);
}

#[test]
fn memory_that_is_scarce_is_divided_by_weight() {
    let vms = [
        ("a", limited(Vm::new(1024, 6000), 64, 8192, 100)),
        ("b", limited(Vm::new(1024, 6000), 64, 8192, 300)),
    ];
    let mut machine = machine(8192, vms);
    machine.periods(10);
    assert_eq!((machine.size("a"), machine.size("b")), (2048, 6144));
    assert_eq!(machine.periods(50), []);
    let plan = machine.look();
    // Both VMs have their shares, and both would take more.
    assert!(
        matches!(decision(&plan, "a").why, Why::Lacks { .. } | Why::Fits),
        "{}",
        decision(&plan, "a")
    );
}

#[test]
fn a_vm_above_its_share_gives_down_to_it_but_keeps_its_use() {
    // `a` has 3 GiB of slack on 12 GiB, which may stay as long as `b` does not swap.
    let vms = [("a", Vm::new(12288, 9600)), ("b", Vm::new(2048, 1500))];
    let mut machine = machine(14336, vms);
    machine.periods(20);
    machine.vm("b").load = 6000;
    let moves = said(&machine.periods(3));
    // `a` keeps its use, the least slack and half a section: 9792 MiB, rounded as shrinks are.
    assert_eq!(moves[..2], ["a 12160>9856 Share", "b 2048>4480 Swaps waits"]);
    assert_eq!(moves.len(), 2, "{moves:?}");
    assert_eq!(machine.vm("a").swapping(), 0);
}

#[test]
fn a_vm_below_its_min_grows_before_all_others() {
    let vms = [("a", limited(Vm::new(512, 100), 2048, 4096, 1)), ("b", Vm::new(1024, 4000))];
    let mut machine = machine(3072, vms);
    let moves = said(&machine.periods(1));
    assert_eq!(moves, ["a 512>2048 Min"]);
}

#[test]
fn a_vm_above_its_max_shrinks_to_it_but_keeps_what_it_uses() {
    let mut machine = machine(8192, [("a", limited(Vm::new(4096, 500), 64, 1000, 100))]);
    // The VM shrinks to no less than its max, by whole sections.
    assert_eq!(said(&machine.periods(1)), ["a 4096>1024 OverMax"]);
    let mut full = self::machine(8192, [("a", limited(Vm::new(4096, 3500), 64, 1000, 100))]);
    assert_eq!(said(&full.periods(1)), ["a 4096>3712 OverMax"]);
}

#[test]
fn a_short_host_grants_wishes_only() {
    let vms = [("a", Vm { wish: 512, ..Vm::new(1024, 700) }), ("b", Vm::new(1024, 1000))];
    let mut machine = machine(8192, vms);
    machine.short = true;
    let plan = machine.period();
    assert_eq!(said(&plan.moves), ["a 1024>1408 Wish"]);
    assert!(matches!(decision(&plan, "b").why, Why::HostShort { .. }));
    assert!(decision(&plan, "b").to_string().contains("the host itself is short of memory"));
}

#[test]
fn surplus_returns_to_a_short_host_or_by_configuration() {
    let idle = || [("a", Vm::new(4096, 800))];
    let mut keeps = machine(8192, idle());
    assert_eq!(keeps.periods(20), []);
    assert!(decision(&keeps.look(), "a").to_string().ends_with("which no other VM needs"));
    keeps.short = true;
    assert_eq!(said(&keeps.periods(20)), ["a 4096>1152 Return"]);
    let mut returns =
        Machine::new(Config { keep_surplus: false, ..Config::default() }, 8192, idle());
    assert_eq!(returns.periods(4), []);
    assert_eq!(said(&returns.periods(20)), ["a 4096>1152 Return"]);
}

#[test]
fn when_no_section_is_free_one_is_made_so_ahead() {
    let mut machine = machine(5120, [("a", Vm::new(1024, 700)), ("b", Vm::new(4096, 800))]);
    assert_eq!(said(&machine.periods(50)), ["b 4096>3968 Ahead"]);
}

#[test]
fn a_silent_or_resizing_vm_keeps_its_size() {
    let vms = [
        ("busy", Vm { busy: true, ..Vm::new(4096, 100) }),
        ("mute", Vm { answers: false, ..Vm::new(4096, 100) }),
        ("swaps", Vm::new(1024, 3000)),
    ];
    let mut machine = machine(9216, vms);
    for _ in 0..20 {
        let plan = machine.period();
        assert_eq!(plan.moves, []);
        assert_eq!(decision(&plan, "mute").why, Why::Silent);
        assert_eq!(decision(&plan, "busy").why, Why::Busy);
    }
    // A silence in between restarts the count of a surplus.
    machine.vm("mute").answers = true;
    machine.vm("swaps").load = 500;
    assert!(matches!(decision(&machine.look(), "mute").why, Why::Lasts { periods: 1, .. }));
}

#[test]
fn vms_come_and_go() {
    let mut machine = machine(8192, [("a", Vm::new(1024, 700)), ("b", Vm::new(6144, 2000))]);
    machine.periods(10);
    let gone = machine.vms.remove("b").unwrap();
    assert_eq!(machine.periods(1), []);
    machine.vms.insert("b", gone);
    // The balancer has forgotten its history, so its surplus has to last again.
    assert!(matches!(decision(&machine.look(), "b").why, Why::Lasts { periods: 1, .. }));
    machine.vms.clear();
    assert_eq!(machine.look().decisions, []);
}

#[test]
fn odd_sizes_move_by_whole_sections_within_their_limits() {
    // From 1000 MiB, three sections fit below the max of 1400; from 1001 MiB, three above the min
    // of 600.
    let vms = [
        ("a", limited(Vm::new(1000, 1200), 64, 1400, 1)),
        ("b", limited(Vm::new(1001, 10), 600, 4096, 1)),
    ];
    let mut machine = machine(2001, vms);
    assert_eq!(said(&machine.periods(1)), ["b 1001>617 Surplus", "a 1000>1384 Tight waits"]);
}

#[test]
fn limits_that_nobody_validated_never_push_a_vm_beyond_its_max() {
    let mut machine = machine(8192, [("a", limited(Vm::new(1024, 900), 4096, 2048, 1))]);
    machine.periods(5);
    assert_eq!(machine.size("a"), 2048);
}

#[test]
fn a_host_without_a_section_moves_nothing_and_says_so() {
    let mut machine = machine(8192, [("a", Vm::new(1024, 1000))]);
    machine.section = Bytes::ZERO;
    let plan = machine.look();
    assert_eq!((plan.moves.len(), decision(&plan, "a").why), (0, Why::NoSection));
}

#[test]
fn a_plan_that_nobody_carries_out_is_made_again() {
    let mut machine = machine(8192, [("a", Vm::new(1024, 1000)), ("b", Vm::new(4096, 100))]);
    let first = machine.look();
    assert_eq!(first.moves.len(), 1);
    for _ in 0..20 {
        assert_eq!(machine.look().moves, first.moves);
    }
}

#[test]
fn lent_memory_comes_back_before_another_vm_gives() {
    let mut machine = machine(5120, [("a", Vm::new(1024, 500)), ("b", Vm::new(4096, 100))]);
    machine.periods(10);
    machine.vm("a").load = 1000;
    let readings = ["a", "b"].map(|vm| machine.vm(vm).reading(vm));
    let host = |recallable| Host {
        sections_free: Bytes::mib(128),
        recallable: Bytes::mib(recallable),
        section: SECTION,
        short: false,
    };
    let plan = |recallable| {
        let plan = Balancer::new(Config::default()).step(&host(recallable), &readings);
        (said(&plan.moves), plan.recall)
    };
    let gives = ["b 3968>3840 Surplus", "a 1024>1280 Tight waits"].map(str::to_owned);
    assert_eq!(plan(0), (gives.to_vec(), Bytes::ZERO));
    // It takes what is free meanwhile.
    assert_eq!(plan(1024), (vec!["a 1024>1152 Tight".to_owned()], Bytes::mib(128)));
}

#[test]
fn figures_that_cannot_be_are_not_believed() {
    let mut reading = Vm::new(4096, 100).reading("a");
    reading.available = reading.total + Bytes(1);
    let host =
        Host { sections_free: Bytes::ZERO, recallable: Bytes::ZERO, section: SECTION, short: true };
    let plan = Balancer::new(Config::default()).step(&host, &[reading.clone(), reading]);
    assert_eq!(plan.decisions.len(), 1, "a VM counts once, however often it is read");
    assert_eq!(plan.decisions[0].why, Why::Silent);
}

#[test]
fn memory_not_yet_counted_by_the_guest_is_no_need() {
    let mut balancer = Balancer::new(Config::default());
    let host = Host {
        sections_free: Bytes::gib(8),
        recallable: Bytes::ZERO,
        section: SECTION,
        short: false,
    };
    let vm = Vm { kept: 50, ..Vm::new(1024, 900) };
    let plan = balancer.step(&host, &[vm.reading("a")]);
    let mut reading = vm.reading("a");
    reading.size = plan.moves[0].to;
    for _ in 0..5 {
        assert_eq!(said(&balancer.step(&host, std::slice::from_ref(&reading)).moves), [""; 0]);
    }
}
