//! The balancer itself: turns the readings of one period into a plan of resizes.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{Bytes, RegionName};

use super::allocation::{Allocation, allocate};
use super::history::History;
use super::section::Section;
use super::vm_state::VmState;
use super::{Because, Config, Host, Move, Plan, Reading, SizeDecision, Want, Why};

/// Decides each period how large each VM of a host becomes. The [module](super) describes the
/// rules.
#[derive(Clone, Debug)]
pub struct Balancer {
    config: Config,
    /// The history of each VM of the last period.
    histories: BTreeMap<RegionName, History>,
}

impl Balancer {
    /// Returns a balancer without history. A balancer shrinks a VM only after it has read that VM
    /// for [`Config::surplus_periods`] periods. Sizes above a VM's max and urgent needs of other
    /// VMs are exceptions.
    pub fn new(config: Config) -> Self {
        Self { config, histories: BTreeMap::new() }
    }

    /// Replaces the settings, from the next period on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Plans one period.
    ///
    /// Call it once a period with all VMs of the host, including VMs that do not answer. The
    /// balancer forgets a VM that is missing from `readings`; of two readings of one VM the first
    /// counts. The plan assumes that nothing else resizes VMs meanwhile. After the plan, the sum of
    /// all sizes is at most the present sum plus [`Host::sections_free`] and [`Host::recallable`].
    pub fn step(&mut self, host: &Host, readings: &[Reading]) -> Plan {
        let mut names = BTreeSet::new();
        let readings = readings.iter().filter(|reading| names.insert(&reading.vm));
        let Some(section) = Section::new(host.section) else {
            let decisions = readings.map(|reading| untouched(reading, Why::NoSection)).collect();
            return Plan { decisions, ..Plan::default() };
        };
        let mut histories = BTreeMap::new();
        let mut vm_states = Vec::new();
        for reading in readings {
            let mut history = self.histories.remove(&reading.vm).unwrap_or_default();
            vm_states.push(VmState::read(reading, &mut history, host, section, &self.config));
            histories.insert(reading.vm.clone(), history);
        }
        self.histories = histories;
        let mut allocations = allocate(host, section, &vm_states, &self.config);
        let recall = recalled(host, section, &allocations);
        if recall > 0 {
            take_what_is_free(section.down(host.sections_free), &vm_states, &mut allocations);
        }
        let plan = self.plan(host, section, &vm_states, &allocations);
        Plan { recall: section.bytes(recall), ..plan }
    }

    fn plan(
        &self,
        host: &Host,
        section: Section,
        vm_states: &[VmState<'_>],
        allocations: &[Allocation],
    ) -> Plan {
        let waits = must_wait(section.down(host.sections_free), vm_states, allocations);
        let each = || vm_states.iter().zip(allocations).zip(&waits);
        let mut moves: Vec<(u8, Move)> = each()
            .filter_map(|((vm_state, allocation), &waits)| {
                let because = because(vm_state, allocation, waits)?;
                let (vm, from) = (vm_state.reading.vm.clone(), vm_state.reading.size);
                let to = to(vm_state, allocation, section);
                Some((place(&because), Move { vm, from, to, because }))
            })
            .collect();
        moves.sort_by_key(|&(place, _)| place);
        let decisions = each().map(|((vm_state, allocation), &waits)| {
            self.decision(vm_state, allocation, waits, section)
        });
        Plan {
            moves: moves.into_iter().map(|(_, one)| one).collect(),
            decisions: decisions.collect(),
            recall: Bytes::ZERO,
        }
    }

    fn decision(
        &self,
        vm_state: &VmState<'_>,
        allocation: &Allocation,
        waits: bool,
        section: Section,
    ) -> SizeDecision {
        let why = self.why(vm_state, allocation, waits, section);
        let Some(figures) = vm_state.figures else { return untouched(vm_state.reading, why) };
        let Reading { size, swap_used, wish, limits, .. } = *vm_state.reading;
        SizeDecision {
            used: figures.used,
            swapped: swap_used,
            kept: figures.kept,
            slack: figures.slack,
            wish,
            need: figures.demand.need,
            target: target(
                size,
                figures.demand.need.max(limits.least()).min(limits.max),
                limits.max,
                section,
            ),
            to: to(vm_state, allocation, section),
            ..untouched(vm_state.reading, why)
        }
    }

    fn why(
        &self,
        vm_state: &VmState<'_>,
        allocation: &Allocation,
        waits: bool,
        section: Section,
    ) -> Why {
        let Reading { size, limits, .. } = *vm_state.reading;
        let Some(figures) = vm_state.figures else { return Why::Silent };
        if vm_state.reading.busy {
            return Why::Busy;
        }
        match because(vm_state, allocation, waits) {
            Some(Because::Shrinks { give }) => return Why::Shrinks { give },
            Some(Because::Grows { want, waits }) => {
                return Why::Grows { want, waits, wanted: section.bytes(vm_state.wants) };
            }
            None => {}
        }
        let surplus = section.bytes(vm_state.spare);
        match vm_state.want {
            Some(want) if vm_state.wants > 0 => {
                Why::Lacks { want, wanted: section.bytes(vm_state.wants), reserve: limits.reserve }
            }
            Some(want) if vm_state.withheld > 0 => {
                Why::HostShort { want, wanted: section.bytes(vm_state.withheld) }
            }
            Some(_) if figures.demand.need > size => Why::AtMax { max: limits.max },
            _ if surplus == Bytes::ZERO => Why::Fits,
            _ if vm_state.hold > 0 => Why::Holds { surplus, periods: vm_state.hold },
            _ if vm_state.lasting > 0 => Why::Keeps { surplus: section.bytes(vm_state.lasting) },
            _ => Why::Lasts {
                surplus,
                periods: vm_state.lasted,
                of: self.config.surplus_periods.max(1),
            },
        }
    }
}

/// Returns a decision on a VM without usable figures of its guest.
fn untouched(reading: &Reading, why: Why) -> SizeDecision {
    let (vm, size) = (reading.vm.clone(), reading.size);
    let none = Bytes::ZERO;
    SizeDecision {
        vm,
        size,
        used: none,
        swapped: none,
        kept: none,
        slack: none,
        wish: reading.wish,
        need: none,
        target: size,
        to: size,
        why,
    }
}

/// Returns the size nearest to `goal` that is whole sections away from `size`. When growing, the
/// result is at least `goal` if max allows; when shrinking, it is no less than `goal`.
fn target(size: Bytes, goal: Bytes, max: Bytes, section: Section) -> Bytes {
    if goal > size {
        let sections =
            section.up(goal.saturating_sub(size)).min(section.down(max.saturating_sub(size)));
        size.saturating_add(section.bytes(sections))
    } else {
        size.saturating_sub(section.bytes(section.down(size.saturating_sub(goal))))
    }
}

fn to(vm_state: &VmState<'_>, allocation: &Allocation, section: Section) -> Bytes {
    let grown = vm_state.reading.size.saturating_add(section.bytes(allocation.gets));
    grown.saturating_sub(section.bytes(allocation.gives))
}

fn because(vm_state: &VmState<'_>, allocation: &Allocation, waits: bool) -> Option<Because> {
    if let (Some(give), 1..) = (allocation.give, allocation.gives) {
        return Some(Because::Shrinks { give });
    }
    vm_state.want.filter(|_| allocation.gets > 0).map(|want| Because::Grows { want, waits })
}

/// Returns how many lent sections the growth takes beyond the free ones.
fn recalled(host: &Host, section: Section, allocations: &[Allocation]) -> u64 {
    let gets = allocations.iter().fold(0, |sum: u64, one| sum.saturating_add(one.gets));
    gets.saturating_sub(section.down(host.sections_free)).min(section.down(host.recallable))
}

/// Lets VMs that are to grow by recalled memory take what is free at once, urgent needs first. They
/// are planned again for the rest: a borrower may take long to give memory back, or be dead.
fn take_what_is_free(mut free: u64, vm_states: &[VmState<'_>], allocations: &mut [Allocation]) {
    for urgent in [true, false] {
        for i in (0..allocations.len()).filter(|&i| vm_states[i].urgent() == urgent) {
            if free > 0 {
                allocations[i].gets = allocations[i].gets.min(free);
                free -= allocations[i].gets;
            }
        }
    }
}

/// Returns for each VM whether it must wait for recalls, or for others to shrink. Free sections
/// go to urgent needs first, then in the order of the readings.
fn must_wait(mut free: u64, vm_states: &[VmState<'_>], allocations: &[Allocation]) -> Vec<bool> {
    let mut waits = vec![false; allocations.len()];
    for urgent in [true, false] {
        for i in (0..allocations.len()).filter(|&i| vm_states[i].urgent() == urgent) {
            match free.checked_sub(allocations[i].gets) {
                Some(left) => free = left,
                None => waits[i] = true,
            }
        }
    }
    waits
}

/// Returns a move's rank in the plan, 0 first.
fn place(because: &Because) -> u8 {
    let urgent = |want: &Want| want.is_urgent();
    match because {
        Because::Grows { want, waits: false } if urgent(want) => 0,
        Because::Grows { waits: false, .. } => 1,
        Because::Shrinks { .. } => 2,
        Because::Grows { want, .. } if urgent(want) => 3,
        Because::Grows { .. } => 4,
    }
}
