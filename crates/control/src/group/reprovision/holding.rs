use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::Config;

/// What a period finds of one VM of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// Which VM.
    pub vm: RegionName,
    /// Its size without extra: it is never told to have less.
    pub base: Bytes,
    /// It is never told to have more. If below `base`, it never gets anything.
    pub max: Bytes,
    /// What its balloon leaves it now.
    pub size: Bytes,
    /// What it was last told to have ([`Verdict::to`](super::Verdict::to)), `size` if nothing yet.
    pub target: Bytes,
    /// Swapped in the period, in and out.
    pub swapped: Bytes,
    /// What it contributes to sharing now ("how many surplus memory pages the VM contributes", section 4.2.2).
    pub contributed: Bytes,
}

/// What these VMs hold beyond their own sizes: each the larger of what it has and what it was told to have.
pub fn handed<'a>(vms: impl IntoIterator<Item = &'a Vm>) -> Bytes {
    vms.into_iter().fold(Bytes::ZERO, |sum, vm| sum.saturating_add(held(vm, vm.target)))
}

fn held(vm: &Vm, target: Bytes) -> Bytes {
    vm.size.max(target).saturating_sub(vm.base)
}

/// A VM, and what it holds in whole steps. Numbers of steps are plain `u64`s within this module.
#[derive(Debug)]
pub(super) struct Holding<'a> {
    pub vm: &'a Vm,
    /// What it was told to have beyond its base, within its limits.
    pub steps: u64,
    /// The most steps that its limits allow.
    pub room: u64,
    /// What it has not given back.
    pub owes: Bytes,
    /// For how many periods it has owed without a step of progress.
    pub idle: u32,
    /// It has owed for too long: the others have to cover it.
    pub stuck: bool,
    /// It swaps.
    pub hungry: bool,
}

impl<'a> Holding<'a> {
    pub fn new(vm: &'a Vm, idle: u32, config: &Config) -> Self {
        let step = config.whole_step();
        let room = vm.max.saturating_sub(vm.base).0 / step.0;
        let steps = (vm.target.saturating_sub(vm.base).0 / step.0).min(room);
        // Not all that is above its target is owed: of what is below its base nothing is the group's.
        let owes = vm.size.saturating_sub(vm.target.max(vm.base));
        let stuck = owes > Bytes::ZERO && idle >= config.patience;
        Self { vm, steps, room, owes, idle, stuck, hungry: vm.swapped > config.swap }
    }

    /// What of its target its guest has not taken yet.
    pub fn untaken(&self) -> Bytes {
        self.vm.target.saturating_sub(self.vm.size)
    }

    /// What its target is with so many steps.
    pub fn target(&self, steps: u64, step: Bytes) -> Bytes {
        self.vm.base.saturating_add(Bytes(step.0.saturating_mul(steps)))
    }

    /// What it holds beyond its base with so many steps.
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
    fn what_was_told_and_what_is_held_both_count() {
        let vms = [vm(512, 600, 522, 532), vm(512, 600, 542, 512), vm(512, 600, 400, 512)];
        assert_eq!(handed(&vms), Bytes::mib(20 + 30));
    }

    #[test]
    fn steps_are_whole_and_within_the_limits() {
        let config = Config::default();
        let steps =
            |vm: &Vm| (Holding::new(vm, 0, &config).steps, Holding::new(vm, 0, &config).room);
        assert_eq!(steps(&vm(512, 547, 527, 527)), (1, 3));
        assert_eq!(steps(&vm(512, 547, 600, 600)), (3, 3));
        assert_eq!(steps(&vm(512, 500, 600, 600)), (0, 0));
    }
}
