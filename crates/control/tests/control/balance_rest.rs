//! Tests of the balancer over time: it serves alternating loads, comes to rest with steady ones,
//! and moves nothing for noise.

use aquifer_control::balance::{Config, Limits, Move};
use aquifer_page::Bytes;

use crate::vms::{Machine, Vm, limits};

/// Two VMs of 1 to 6 GiB that share 8 GiB, each with its own load.
struct Pair {
    machine: Machine,
    moves: Vec<Move>,
}

impl Pair {
    fn new() -> Self {
        let vm = || Vm {
            kept: 60,
            limits: Limits { min: Bytes::gib(1), max: Bytes::gib(6), ..limits() },
            ..Vm::new(1024, 400)
        };
        let machine = Machine::new(Config::default(), 8192, [("a", vm()), ("b", vm())]);
        Self { machine, moves: Vec::new() }
    }

    /// Brings one VM's load to `load` by 128 MiB a period, and then leaves it there for 60 periods.
    fn ramp(&mut self, name: &str, load: u64) {
        while self.machine.vms[name].load != load {
            let vm = self.machine.vm(name);
            vm.load = load.clamp(vm.load.saturating_sub(128), vm.load + 128);
            self.moves.extend(self.machine.period().moves);
        }
        self.moves.extend(self.machine.periods(60));
    }
}

#[test]
fn alternating_loads_fit_without_swap_only_by_the_balancer() {
    let mut pair = Pair::new();
    for _ in 0..3 {
        for name in ["a", "b"] {
            pair.ramp(name, 4400);
            assert!(pair.machine.size(name) >= 4400 + 1100 + 60, "{name}");
            pair.ramp(name, 400);
        }
    }
    assert_eq!((pair.machine.vm("a").swapping(), pair.machine.vm("b").swapping()), (0, 0));
    // A ramp of 4000 MiB needs some moves of each VM, but not one each period.
    assert!(pair.moves.len() < 6 * 80, "{} moves", pair.moves.len());
    // Half of the budget each, as without a balancer, is not enough.
    let mut half =
        Machine::new(Config::default(), 4096, [("a", Vm { kept: 60, ..Vm::new(4096, 4400) })]);
    half.look();
    assert!(half.vm("a").swapping() > 0);
}

/// Returns loads, sizes and weights of three VMs under a budget of 12 GiB.
fn trios() -> Vec<[(u64, u64, u32); 3]> {
    let mut trios = Vec::new();
    for loads in [
        [500, 500, 500],
        [6000, 6000, 6000],
        [9000, 500, 2500],
        [3300, 3400, 3500],
        [100, 12000, 2200],
    ] {
        for weights in [[100, 100, 100], [1, 2, 4], [0, 10, 1]] {
            for sizes in [[4096, 4096, 4096], [1024, 1024, 1024], [8064, 1131, 2048]] {
                trios.push(std::array::from_fn(|i| (loads[i], sizes[i], weights[i])));
            }
        }
    }
    trios
}

fn machine(trio: &[(u64, u64, u32); 3], config: Config) -> Machine {
    let vm = |&(load, size, weight): &(u64, u64, u32)| Vm {
        kept: 40,
        limits: Limits { min: Bytes::mib(512), max: Bytes::gib(8), weight, ..limits() },
        ..Vm::new(size, load)
    };
    Machine::new(config, 12288, [("a", vm(&trio[0])), ("b", vm(&trio[1])), ("c", vm(&trio[2]))])
}

#[test]
fn steady_loads_come_to_rest_whatever_they_are() {
    for keep_surplus in [true, false] {
        for trio in trios() {
            let mut machine = machine(&trio, Config { keep_surplus, ..Config::default() });
            machine.periods(60);
            assert_eq!(machine.periods(60), [], "{trio:?}");
        }
    }
}

/// Returns use that swings by a section from lowest to highest: alternating, in long waves, or at
/// random.
fn noise(period: u64, vm: u64) -> u64 {
    let chance = (period + vm * 977).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    match (period / 100 + vm) % 3 {
        0 => 128 * ((period + vm) % 2),
        1 => 128 * (period / 14 % 2),
        _ => chance % 129,
    }
}

/// Returns the moves after the loads of two VMs, steady for 60 periods, begin to have noise of half
/// a section.
fn moves_by_noise(load: u64, size: u64, keep_surplus: bool) -> Vec<Move> {
    let (a, b) = (load, load / 2 + 64);
    let vm = |load| Vm { kept: 40, ..Vm::new(size, load) };
    let config = Config { keep_surplus, ..Config::default() };
    let mut machine = Machine::new(config, 16384, [("a", vm(a)), ("b", vm(b))]);
    machine.periods(60);
    let mut moves = Vec::new();
    for period in 0..600 {
        machine.vm("a").load = a - 64 + noise(period, 0);
        machine.vm("b").load = b - 64 + noise(period, 1);
        moves.extend(machine.period().moves);
    }
    moves
}

const LOADS: [u64; 8] = [110, 300, 500, 512, 600, 900, 2000, 3000];

#[test]
fn noise_of_half_a_section_moves_no_balanced_vm() {
    for load in LOADS {
        // Each VM starts too small, so the balancer has sized it.
        assert_eq!(moves_by_noise(load, 128, true), [], "{load}");
    }
}

#[test]
fn noise_of_half_a_section_moves_any_vm_at_most_once() {
    for (load, size, keep_surplus) in LOADS.into_iter().flat_map(|load| {
        [(load, 512, true), (load, 512, false), (load, 4096, true), (load, 4096, false)]
    }) {
        let moves = moves_by_noise(load, size, keep_surplus);
        for vm in ["a", "b"] {
            assert!(
                moves.iter().filter(|one| one.vm.as_str() == vm).count() <= 1,
                "{load} {size}: {moves:?}"
            );
        }
    }
}

#[test]
fn noise_comes_to_rest_also_where_memory_is_scarce() {
    for trio in trios() {
        let mut machine = machine(&trio, Config::default());
        let mut moves = Vec::new();
        for period in 0..900 {
            for (i, name) in (0..).zip(["a", "b", "c"]) {
                machine.vm(name).load = trio[i].0 - 64 + noise(period, i as u64);
            }
            let plan = machine.period();
            if period >= 450 {
                moves.extend(plan.moves);
            }
        }
        assert_eq!(moves, [], "{trio:?}");
    }
}
