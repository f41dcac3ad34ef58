//! One VM's share of the surplus, in whole steps.

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::Config;

/// The figures of one VM of the group in one period.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// The VM.
    pub vm: RegionName,
    /// The VM's size without any surplus, below which no target goes.
    pub base: Bytes,
    /// The limit of the VM's target. If the limit is below `base`, the VM gets no surplus.
    pub max: Bytes,
    /// The size that the balloon leaves the VM at present.
    pub size: Bytes,
    /// The VM's last target ([`TargetDecision::to`](super::TargetDecision::to)); `size` if the VM
    /// had none yet.
    pub target: Bytes,
    /// Bytes swapped in the period, in and out.
    pub swapped: Bytes,
    /// The VM's present contribution to sharing ("how many surplus memory pages the VM
    /// contributes", section 4.2.2).
    pub contributed: Bytes,
}

/// Returns the bytes that these VMs hold beyond their bases. For each VM, the larger of size and
/// target counts.
pub fn handed<'a>(vms: impl IntoIterator<Item = &'a Vm>) -> Bytes {
    vms.into_iter().fold(Bytes::ZERO, |sum, vm| sum.saturating_add(held(vm, vm.target)))
}

fn held(vm: &Vm, target: Bytes) -> Bytes {
    vm.size.max(target).saturating_sub(vm.base)
}

/// A VM, and its share in whole steps. Within this module, numbers of steps are plain `u64`s.
#[derive(Clone, Debug)]
pub(super) struct VmAllocation<'a> {
    pub vm: &'a Vm,
    /// Steps of the VM's target beyond the base, within the VM's limits.
    pub steps: u64,
    /// The most steps that the VM's limits allow.
    pub room: u64,
    /// The bytes that the VM must still give back.
    pub owes: Bytes,
    /// The number of periods for which the VM has owed without a step of progress.
    pub idle: u32,
    /// Whether the VM has owed for too long, so that the others cover its debt.
    pub stuck: bool,
    /// Whether the VM swaps.
    pub hungry: bool,
}

impl<'a> VmAllocation<'a> {
    pub fn new(vm: &'a Vm, idle: u32, config: &Config) -> Self {
        let step = config.whole_step();
        let room = vm.max.saturating_sub(vm.base).0 / step.0;
        let steps = (vm.target.saturating_sub(vm.base).0 / step.0).min(room);
        // The debt counts only down to the base, because the group owns nothing below it.
        let owes = vm.size.saturating_sub(vm.target.max(vm.base));
        let stuck = owes > Bytes::ZERO && idle >= config.debt_periods;
        Self { vm, steps, room, owes, idle, stuck, hungry: vm.swapped > config.swap }
    }

    /// Returns the bytes of the target that the guest has not taken yet.
    pub fn untaken(&self) -> Bytes {
        self.vm.target.saturating_sub(self.vm.size)
    }

    /// Returns the VM's target for a number of steps.
    pub fn target(&self, steps: u64, step: Bytes) -> Bytes {
        self.vm.base.saturating_add(Bytes(step.0.saturating_mul(steps)))
    }

    /// Returns the bytes that the VM holds beyond the base with a number of steps.
    pub fn held(&self, steps: u64, step: Bytes) -> Bytes {
        held(self.vm, self.target(steps, step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(base: u64, max: u64, size: u64, target: u64) -> Vm {
        let [base, max, size, target] = [base, max, size, target].map(Bytes::mib);
        let vm = "a".parse().unwrap();
        Vm { vm, base, max, size, target, swapped: Bytes::ZERO, contributed: Bytes::ZERO }
    }

    #[test]
    fn targets_and_sizes_both_count() {
        let vms = [vm(512, 600, 522, 532), vm(512, 600, 542, 512), vm(512, 600, 400, 512)];
        assert_eq!(handed(&vms), Bytes::mib(20 + 30));
    }

    #[test]
    fn steps_are_whole_and_within_the_limits() {
        let config = Config::default();
        let steps = |vm: &Vm| {
            let allocation = VmAllocation::new(vm, 0, &config);
            (allocation.steps, allocation.room)
        };
        assert_eq!(steps(&vm(512, 547, 527, 527)), (1, 3));
        assert_eq!(steps(&vm(512, 547, 600, 600)), (3, 3));
        assert_eq!(steps(&vm(512, 500, 600, 600)), (0, 0));
    }
}
