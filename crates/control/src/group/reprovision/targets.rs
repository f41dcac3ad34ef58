//! Each VM's part of the surplus by the policy, in whole steps.

use std::cmp::Reverse;

use aquifer_page::Bytes;

use super::vm_allocation::VmAllocation;
use super::{Config, Policy};

/// The bounds within which each VM keeps its steps.
#[derive(Debug)]
pub(super) struct StepTargets {
    /// The bound below which the VM gets a step.
    pub up: Vec<u64>,
    /// The bound above which the VM gives a step even without a deficit.
    pub down: Vec<u64>,
}

/// The policy, and all VMs of a period.
pub(super) struct Division<'a> {
    pub config: &'a Config,
    pub all: &'a [VmAllocation<'a>],
}

impl Division<'_> {
    /// Returns the bounds of each VM. `able` is the surplus that may stay handed out, and `free`
    /// the part of the surplus that is left to give. `awaited` bytes have still to come back from
    /// other groups, which is no reason to take steps from a VM.
    ///
    /// `up` divides `able` less `awaited` and the cache's reserve; `down` divides all of `able`. A
    /// VM between the two stays. So a surplus that varies by less than the reserve moves no VM. If
    /// a VM is below its part and too little is free, or equal parts are uneven, `down` equals
    /// `up`.
    pub fn targets(&self, able: Bytes, awaited: Bytes, free: Bytes) -> StepTargets {
        let steps = || self.all.iter().map(|one| one.steps);
        if self.config.policy == Policy::Demand {
            let up = self
                .all
                .iter()
                .map(|one| if one.hungry { (one.steps + 1).min(one.room) } else { one.steps });
            return StepTargets { up: up.collect(), down: steps().collect() };
        }
        let up = self.of(able.saturating_sub(awaited).saturating_sub(self.config.keep));
        let lacks = steps().zip(&up).any(|(steps, &up)| steps < up);
        let tight = lacks && free < self.config.whole_step().saturating_add(self.config.keep);
        let high = self.of(able);
        let mut down: Vec<u64> = match self.config.policy {
            // One step above the part is still within a step of it.
            Policy::Entitlement => high.iter().map(|high| high + 1).collect(),
            _ => high,
        };
        let uneven = self.config.policy == Policy::Fair && !self.even();
        if tight || (uneven && awaited == Bytes::ZERO) {
            down.clone_from(&up);
        }
        StepTargets { up, down }
    }

    /// Returns the parts of `surplus`, in total at most `surplus`. By demand, all parts are zero.
    pub fn of(&self, surplus: Bytes) -> Vec<u64> {
        let step = self.config.whole_step();
        match self.config.policy {
            Policy::Demand => vec![0; self.all.len()],
            Policy::Fair => {
                let level = self.level(surplus.0 / step.0);
                self.all.iter().map(|one| one.room.min(level)).collect()
            }
            Policy::Entitlement => {
                let all: u128 = self.all.iter().map(|one| u128::from(one.vm.contributed.0)).sum();
                let part = |one: &VmAllocation<'_>| {
                    let part = u128::from(surplus.0) * u128::from(one.vm.contributed.0);
                    // The part is at most the surplus, so it fits.
                    let part = u64::try_from(part / all.max(1)).unwrap_or(surplus.0);
                    (part / step.0).min(one.room)
                };
                self.all.iter().map(part).collect()
            }
        }
    }

    /// Returns the parts of the VMs that are not stuck, if they divide what the others leave of
    /// `surplus`. To take steps from a VM that is stuck covers nothing soon.
    pub fn of_others(&self, surplus: Bytes) -> Vec<u64> {
        let (stuck, others): (Vec<_>, Vec<_>) = self.all.iter().cloned().partition(|one| one.stuck);
        let kept = stuck.iter().fold(0_u64, |sum, one| sum.saturating_add(one.steps));
        let rest = surplus.0.saturating_sub(self.config.whole_step().0.saturating_mul(kept));
        let others = Division { config: self.config, all: &others };
        let mut parts = others.of(Bytes(rest)).into_iter();
        let mut next = || parts.next().unwrap_or(0);
        self.all.iter().map(|one| if one.stuck { 0 } else { next() }).collect()
    }

    /// Returns the most steps that every VM with room for them can have, out of `steps` for all.
    fn level(&self, mut steps: u64) -> u64 {
        let mut rooms: Vec<u64> = self.all.iter().map(|one| one.room).collect();
        rooms.sort_unstable();
        let mut level = 0;
        for (done, &room) in rooms.iter().enumerate() {
            let with_room = (rooms.len() - done) as u64;
            let each = (steps / with_room).min(room - level);
            level += each;
            steps -= each * with_room;
            if level < room {
                break;
            }
        }
        level
    }

    /// Returns whether all VMs have the same number of steps, as far as they have room.
    fn even(&self) -> bool {
        let most = self.all.iter().map(|one| one.steps).max().unwrap_or(0);
        self.all.iter().all(|one| one.steps == one.room.min(most))
    }

    /// Returns the sort key for giving: the least key gets first.
    pub fn first_to_get(&self, which: usize, up: u64) -> impl Ord + use<> {
        let one = &self.all[which];
        (Reverse(self.swapped(one)), Reverse(up.saturating_sub(one.steps)), one.steps)
    }

    /// Returns the sort key for covering a deficit: the least key gives first. A VM that is stuck
    /// comes last.
    pub fn first_to_give(&self, which: usize, part: u64) -> impl Ord + use<> {
        let one = &self.all[which];
        (
            one.stuck,
            one.untaken() == Bytes::ZERO,
            self.swapped(one),
            Reverse(one.steps.saturating_sub(part)),
        )
    }

    /// Returns the bytes that the VM swapped if the policy depends on them, else zero.
    fn swapped(&self, one: &VmAllocation<'_>) -> Bytes {
        if self.config.policy == Policy::Demand { one.vm.swapped } else { Bytes::ZERO }
    }

    /// Returns the bytes that the surplus lacks for the next steps of VMs that swap. `lack` is the
    /// number of such VMs without a step, and `free` the surplus left.
    ///
    /// By entitlement it is zero, because no VM has contributed borrowed memory.
    pub fn short(&self, lack: usize, free: Bytes) -> Bytes {
        let steps = match self.config.policy {
            Policy::Demand => lack,
            Policy::Fair if lack > 0 => self.all.iter().filter(|one| one.steps < one.room).count(),
            Policy::Fair | Policy::Entitlement => 0,
        };
        if steps == 0 {
            return Bytes::ZERO;
        }
        let all = Bytes(self.config.whole_step().0.saturating_mul(steps as u64));
        all.saturating_add(self.config.keep).saturating_sub(free)
    }
}
