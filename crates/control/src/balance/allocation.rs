//! The division of one period's sections: which VMs give, and which VMs get.

use std::cmp::Ordering;

use super::section::Section;
use super::shares::{Claim, Grower, divide, fair};
use super::vm_state::VmState;
use super::{Config, Give, Host};

/// One VM's result of the division, in sections. A VM gives or gets, never both.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Allocation {
    pub(super) gives: u64,
    pub(super) give: Option<Give>,
    pub(super) gets: u64,
}

/// Divides the free and the given sections, by the four steps of the module's documentation.
pub(super) fn allocate(
    host: &Host,
    section: Section,
    vm_states: &[VmState<'_>],
    config: &Config,
) -> Vec<Allocation> {
    // Lent memory comes back before any VM gives for another.
    let free = section.down(host.sections_free).saturating_add(section.down(host.recallable));
    let mut allocator = Allocator {
        vm_states,
        section,
        free,
        pot: free,
        allocations: vec![Allocation::default(); vm_states.len()],
    };
    allocator.take(u64::MAX, Give::OverMax, &allocator.each(|vm_state| vm_state.over_max));
    let lasting = allocator.each(|vm_state| vm_state.surplus(false));
    if !config.keep_surplus || host.short {
        allocator.take(u64::MAX, Give::Return, &lasting);
    }
    allocator.take(allocator.missing(), Give::Surplus, &lasting);
    let now = allocator.each(|vm_state| vm_state.surplus(true));
    allocator.take(allocator.missing().min(allocator.urgent()), Give::Surplus, &now);
    if allocator.missing() > 0 {
        allocator.even_out();
    }
    allocator.hand_out();
    if allocator.pot == 0 && vm_states.iter().all(|vm_state| vm_state.wants == 0) {
        allocator.take(1, Give::Ahead, &lasting);
    }
    allocator.allocations
}

/// One period's division. All numbers are of sections.
struct Allocator<'a> {
    vm_states: &'a [VmState<'a>],
    section: Section,
    free: u64,
    /// The free sections, those that can be recalled, and those given so far.
    pot: u64,
    allocations: Vec<Allocation>,
}

impl Allocator<'_> {
    fn each(&self, of: impl Fn(&VmState<'_>) -> u64) -> Vec<u64> {
        self.vm_states.iter().map(of).collect()
    }

    /// Returns the sections that the pot lacks to meet all wants.
    fn missing(&self) -> u64 {
        total(self.vm_states.iter().map(|vm_state| vm_state.wants)).saturating_sub(self.pot)
    }

    /// Returns the sections that VMs with urgent needs want.
    fn urgent(&self) -> u64 {
        total(
            self.vm_states
                .iter()
                .filter(|vm_state| vm_state.urgent())
                .map(|vm_state| vm_state.wants),
        )
    }

    /// Takes up to `most` sections from VMs, each of which may give up to its entry in `has` in
    /// total. The VM with the largest surplus by weight gives first, so that few VMs are disturbed.
    fn take(&mut self, mut most: u64, give: Give, has: &[u64]) {
        let left = has.iter().zip(&self.allocations);
        let left = left.map(|(has, allocation)| has.saturating_sub(allocation.gives));
        let mut order: Vec<(usize, u64)> = left.enumerate().filter(|&(_, left)| left > 0).collect();
        order.sort_by(|&one, &other| self.precedence(one, other));
        for (i, left) in order {
            let gives = left.min(most);
            if gives > 0 {
                self.allocations[i].gives += gives;
                self.allocations[i].give = Some(give);
                self.pot = self.pot.saturating_add(gives);
                most -= gives;
            }
        }
    }

    /// Orders two VMs, each with its sections to give: the one to give first comes first. Any
    /// surplus of a VM of weight 0 counts as infinite.
    fn precedence(&self, (one, has): (usize, u64), (other, other_has): (usize, u64)) -> Ordering {
        let [a, b] = [one, other].map(|i| self.vm_states[i].reading);
        let crossed = (u128::from(other_has) * u128::from(a.limits.weight))
            .cmp(&(u128::from(has) * u128::from(b.limits.weight)));
        crossed.then(other_has.cmp(&has)).then_with(|| a.vm.cmp(&b.vm))
    }

    /// Takes sections from VMs above their fair share, down to that share, as far as other VMs are
    /// below theirs by whole sections.
    fn even_out(&mut self) {
        let (vm_states, at_once) = (self.vm_states, self.urgent() > 0);
        let (places, claims): (Vec<usize>, Vec<Claim>) = vm_states
            .iter()
            .enumerate()
            .filter_map(|(i, vm_state)| Some((i, self.claim(vm_state, at_once)?)))
            .unzip();
        let sizes: u128 = places.iter().map(|&i| u128::from(vm_states[i].reading.size.0)).sum();
        let shares = fair(sizes + u128::from(self.section.bytes(self.free).0), &claims);
        let (mut below, mut above) = (0u64, vec![0; vm_states.len()]);
        for (&i, &share) in places.iter().zip(&shares) {
            let vm_state = &vm_states[i];
            let size = vm_state.reading.size;
            below = below
                .saturating_add(self.section.down(share.saturating_sub(size)).min(vm_state.wants));
            if let (0, Some(keeps)) = (vm_state.hold, vm_state.keeps(at_once, self.section)) {
                above[i] = self.section.down(size.saturating_sub(keeps.max(share)));
            }
        }
        self.take(below.saturating_sub(self.pot), Give::Share, &above);
    }

    /// Returns a VM's claim for the division of all memory, or `None` if the VM takes no part.
    fn claim(&self, vm_state: &VmState<'_>, at_once: bool) -> Option<Claim> {
        let floor = vm_state.figures.filter(|_| !vm_state.reading.busy)?.demand.floor;
        let limits = vm_state.reading.limits;
        let most = vm_state.reading.size.saturating_add(self.section.bytes(vm_state.wants));
        let most = most.saturating_sub(self.section.bytes(vm_state.surplus(at_once)));
        Some(Claim { least: floor.max(limits.least()).min(most), most, weight: limits.weight })
    }

    /// Gives the pot to the VMs that want sections: up to their mins first, then the rest.
    fn hand_out(&mut self) {
        for to_min in [true, false] {
            let growers: Vec<Grower> =
                (0..self.vm_states.len()).map(|i| self.grower(i, to_min)).collect();
            let divided = divide(self.pot, &growers, self.section);
            for (allocation, gets) in self.allocations.iter_mut().zip(divided) {
                allocation.gets += gets;
                self.pot -= gets;
            }
        }
    }

    fn grower(&self, i: usize, to_min: bool) -> Grower {
        let (vm_state, allocation) = (&self.vm_states[i], self.allocations[i]);
        let limits = vm_state.reading.limits;
        let size = vm_state.reading.size.saturating_add(self.section.bytes(allocation.gets));
        let wants = if allocation.gives > 0 { 0 } else { vm_state.wants - allocation.gets };
        let most =
            if to_min { self.section.up(limits.least().saturating_sub(size)) } else { u64::MAX };
        Grower { size, wants: wants.min(most), weight: limits.weight }
    }
}

fn total(sections: impl Iterator<Item = u64>) -> u64 {
    sections.fold(0, u64::saturating_add)
}
