//! The reprovisioner: turns a group's surplus into balloon targets.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{Bytes, RegionName};

use super::targets::{Division, StepTargets};
use super::vm_allocation::VmAllocation;
use super::{Cache, Config, Plan, Policy, TargetDecision, Vm, Why};
use crate::group::Surplus;

/// Hands a group's surplus to its VMs, period by period. The [module](super) describes the rules.
#[derive(Clone, Debug)]
pub struct Reprovisioner {
    config: Config,
    /// The VMs that owed memory in the last period.
    debtors: BTreeMap<RegionName, Debtor>,
}

/// A VM that has not given back all memory above its target.
#[derive(Clone, Copy, Debug)]
struct Debtor {
    /// The VM's size at its last step of progress.
    size: Bytes,
    /// The number of periods since that step.
    periods: u32,
}

/// The steps of all VMs after this period.
struct Moved {
    steps: Vec<u64>,
    /// The bytes by which the targets exceeded the surplus that may stay with VMs.
    deficit: Bytes,
    /// The surplus that is left.
    free: Bytes,
    targets: StepTargets,
}

impl Reprovisioner {
    /// Returns a reprovisioner that has read no VM yet. Each reading has the bytes that a VM holds,
    /// so it may start at any time.
    pub fn new(config: Config) -> Self {
        Self { config, debtors: BTreeMap::new() }
    }

    /// Replaces the settings, from the next period on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Plans one period.
    ///
    /// Call it with all VMs of the group; of two readings of one VM the first counts. After it, the
    /// sum of all targets beyond the VMs' bases is at most the surplus.
    pub fn step(&mut self, surplus: Surplus, vms: &[Vm]) -> Plan {
        let mut names = BTreeSet::new();
        let mut debtors = BTreeMap::new();
        let all: Vec<VmAllocation<'_>> = vms
            .iter()
            .filter(|vm| names.insert(&vm.vm))
            .map(|vm| {
                let debtor = self.debtor(vm);
                debtors.extend(debtor.map(|debtor| (vm.vm.clone(), debtor)));
                VmAllocation::new(vm, debtor.map_or(0, |debtor| debtor.periods), &self.config)
            })
            .collect();
        self.debtors = debtors;
        let division = Division { config: &self.config, all: &all };
        let moved = self.moved(surplus, &division);
        self.plan(surplus, &division, &moved)
    }

    /// Returns how long the VM has owed memory, or `None` if it owes none.
    fn debtor(&self, vm: &Vm) -> Option<Debtor> {
        let owed = vm.target.max(vm.base);
        if vm.size <= owed {
            return None;
        }
        let now = Debtor { size: vm.size, periods: 0 };
        let Some(&before) = self.debtors.get(&vm.vm) else { return Some(now) };
        let progress = vm.size.saturating_add(self.config.whole_step()) <= before.size;
        Some(if progress {
            now
        } else {
            Debtor { periods: before.periods.saturating_add(1), ..before }
        })
    }

    fn moved(&self, surplus: Surplus, division: &Division<'_>) -> Moved {
        let (all, step) = (division.all, self.config.whole_step());
        let mut steps: Vec<u64> = all.iter().map(|one| one.steps).collect();
        let sum =
            |bytes: &mut dyn Iterator<Item = Bytes>| bytes.fold(Bytes::ZERO, Bytes::saturating_add);
        let stuck = sum(&mut all.iter().filter(|one| one.stuck).map(|one| one.owes));
        let able = surplus.bytes.saturating_sub(stuck);
        let told = sum(&mut steps.iter().map(|&steps| Bytes(step.0.saturating_mul(steps))));
        let held = sum(&mut all.iter().map(|one| one.held(one.steps, step)));
        let mut free = surplus.bytes.saturating_sub(surplus.awaited).saturating_sub(held);
        let deficit = told.saturating_sub(able);
        let targets = division.targets(able, surplus.awaited, free);
        if deficit > Bytes::ZERO {
            take(division, deficit.0.div_ceil(step.0), able, &mut steps);
        } else {
            for ((steps, one), &down) in steps.iter_mut().zip(all).zip(&targets.down) {
                *steps -= u64::from(one.steps > down);
            }
            self.give(division, &targets, &mut steps, &mut free);
        }
        Moved { steps, deficit, free, targets }
    }

    /// Gives a step to each VM below its part, while surplus is left.
    fn give(
        &self,
        division: &Division<'_>,
        targets: &StepTargets,
        steps: &mut [u64],
        free: &mut Bytes,
    ) {
        let (all, step) = (division.all, self.config.whole_step());
        let least = step.saturating_add(self.config.keep);
        let mut order: Vec<usize> = (0..all.len())
            .filter(|&i| all[i].steps < targets.up[i] && all[i].untaken() == Bytes::ZERO)
            .collect();
        order.sort_by_key(|&i| division.first_to_get(i, targets.up[i]));
        for i in order {
            if *free < least {
                return;
            }
            let one = &all[i];
            steps[i] += 1;
            let more = one.held(steps[i], step).saturating_sub(one.held(one.steps, step));
            *free = free.saturating_sub(more);
        }
    }

    fn plan(&self, surplus: Surplus, division: &Division<'_>, moved: &Moved) -> Plan {
        let step = self.config.whole_step();
        let each = || division.all.iter().zip(&moved.steps).enumerate();
        let handed =
            each().fold(Bytes::ZERO, |sum, (_, (one, &to))| sum.saturating_add(one.held(to, step)));
        let left = surplus.bytes.saturating_sub(surplus.awaited).saturating_sub(handed);
        let unserved = each()
            .filter(|(_, (one, to))| {
                one.hungry
                    && **to <= one.steps
                    && one.steps < one.room
                    && one.untaken() == Bytes::ZERO
            })
            .count();
        Plan {
            cache: Cache { size: left, surplus: surplus.bytes, awaited: surplus.awaited, handed },
            deficit: handed.saturating_sub(surplus.bytes),
            short: division.short(unserved, left),
            decisions: each()
                .map(|(i, (one, &to))| TargetDecision {
                    vm: one.vm.vm.clone(),
                    base: one.vm.base,
                    from: one.vm.target,
                    to: one.target(to, step),
                    why: self.why(one, to, moved, moved.targets.up[i]),
                })
                .collect(),
        }
    }

    fn why(&self, one: &VmAllocation<'_>, to: u64, moved: &Moved, part: u64) -> Why {
        let Vm { max, swapped, target, .. } = *one.vm;
        let step = self.config.whole_step();
        let (untaken, part_bytes) = (one.untaken(), Bytes(step.0.saturating_mul(part)));
        if to < one.steps && moved.deficit > Bytes::ZERO {
            Why::Deficit { deficit: moved.deficit }
        } else if to > one.steps && self.config.policy == Policy::Demand {
            Why::Swaps { swapped }
        } else if to != one.steps {
            Why::Part { part: part_bytes }
        } else if one.target(to, step) != target {
            Why::Limits { max }
        } else if one.owes > Bytes::ZERO {
            Why::Owes { owes: one.owes, periods: one.idle, covered: one.stuck }
        } else if one.hungry && one.steps == one.room {
            Why::AtMax { max }
        } else if one.steps < part && untaken > Bytes::ZERO {
            Why::Untaken { untaken }
        } else if one.steps < part {
            Why::Short { free: moved.free, keep: self.config.keep.min(moved.free) }
        } else {
            Why::Stays
        }
    }
}

/// Takes `wanted` steps to cover a deficit, and leaves each VM at least its part of `able`. A VM
/// that is stuck gives last, and only what the others cannot cover.
fn take(division: &Division<'_>, mut wanted: u64, able: Bytes, steps: &mut [u64]) {
    let parts = division.of_others(able);
    let mut order: Vec<usize> = (0..steps.len()).collect();
    order.sort_by_key(|&i| division.first_to_give(i, parts[i]));
    for i in order {
        let gives = steps[i].saturating_sub(parts[i]).min(wanted);
        steps[i] -= gives;
        wanted -= gives;
    }
}
