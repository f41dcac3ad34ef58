//! A tenant's group of VMs with obedient or disobedient guests, which swap pages that do not fit.

pub mod host;

use std::collections::BTreeMap;

use aquifer_control::group::Surplus;
use aquifer_control::group::reprovision::{Config, Plan, Policy, Reprovisioner, Vm, handed};
use aquifer_page::Bytes;

/// One step of balloons, in MiB.
pub const STEP: u64 = 10;

/// A guest, in MiB.
#[derive(Clone, Debug)]
pub struct Guest {
    pub base: u64,
    pub max: u64,
    pub size: u64,
    pub target: u64,
    /// The use of the guest's programs, whether it fits or not.
    pub load: u64,
    pub contributed: u64,
    /// The most that the balloon gives back, and takes, in a period.
    pub gives: u64,
    pub takes: u64,
}

impl Guest {
    /// Returns an obedient guest of 512 MiB.
    pub fn new(load: u64) -> Self {
        Self {
            base: 512,
            max: 4096,
            size: 512,
            target: 512,
            load,
            contributed: 100,
            gives: u64::MAX,
            takes: u64::MAX,
        }
    }

    pub fn extra(&self) -> u64 {
        self.size - self.base
    }

    /// Returns its swap traffic in a period: a share of the pages that do not fit, within a disk's
    /// rate.
    pub fn swaps(&self) -> u64 {
        self.load.saturating_sub(self.size).div_ceil(4).min(100)
    }

    fn follow(&mut self) {
        let least = self.size.saturating_sub(self.gives);
        self.size = self.target.clamp(least, self.size.saturating_add(self.takes));
    }

    pub fn vm(&self, name: &str) -> Vm {
        Vm {
            vm: name.parse().expect("the test names it well"),
            base: Bytes::mib(self.base),
            max: Bytes::mib(self.max),
            size: Bytes::mib(self.size),
            target: Bytes::mib(self.target),
            swapped: Bytes::mib(self.swaps()),
            contributed: Bytes::mib(self.contributed),
        }
    }
}

/// A group, in MiB.
#[derive(Debug)]
pub struct Tenant {
    pub guests: BTreeMap<String, Guest>,
    pub saved: u64,
    pub awaited: u64,
    pub config: Config,
    reprovisioner: Reprovisioner,
}

impl Tenant {
    pub fn new(
        policy: Policy,
        saved: u64,
        loads: impl IntoIterator<Item = (&'static str, Guest)>,
    ) -> Self {
        let config = Config { policy, ..Config::default() };
        assert_eq!(config.validate(), Ok(()));
        let guests = loads.into_iter().map(|(name, guest)| (name.to_owned(), guest)).collect();
        Self {
            guests,
            saved,
            awaited: 0,
            reprovisioner: Reprovisioner::new(config.clone()),
            config,
        }
    }

    pub fn guest(&mut self, name: &str) -> &mut Guest {
        self.guests.get_mut(name).expect("there is such a guest")
    }

    pub fn vms(&self) -> Vec<Vm> {
        self.guests.iter().map(|(name, guest)| guest.vm(name)).collect()
    }

    pub fn handed(&self) -> u64 {
        handed(&self.vms()).0 >> 20
    }

    pub fn swaps(&self) -> u64 {
        self.guests.values().map(Guest::swaps).sum()
    }

    pub fn extras(&self) -> Vec<u64> {
        self.guests.values().map(Guest::extra).collect()
    }

    /// Runs one period; guests follow the plan afterwards.
    pub fn period(&mut self) -> Plan {
        let vms = self.vms();
        let surplus = Surplus { bytes: Bytes::mib(self.saved), awaited: Bytes::mib(self.awaited) };
        let plan = self.reprovisioner.step(surplus, &vms);
        check(&self.config, surplus, &vms, &plan);
        for (guest, decision) in self.guests.values_mut().zip(&plan.decisions) {
            guest.target = decision.to.0 >> 20;
            guest.follow();
        }
        plan
    }

    /// Runs several periods, and returns their moves in a short form to compare: `a +10`.
    pub fn periods(&mut self, periods: usize) -> Vec<String> {
        (0..periods).flat_map(|_| said(&self.period())).collect()
    }
}

pub fn said(plan: &Plan) -> Vec<String> {
    let mib = |bytes: Bytes| i64::try_from(bytes.0 >> 20).expect("it is no such size");
    let moves = plan.decisions.iter().filter(|decision| decision.from != decision.to);
    moves.map(|one| format!("{} {:+}", one.vm, mib(one.to) - mib(one.from))).collect()
}

/// Checks the invariants of each plan, for any readings.
pub fn check(config: &Config, surplus: Surplus, vms: &[Vm], plan: &Plan) {
    assert_eq!(plan.decisions.len(), vms.len(), "one decision each");
    let (mut told, mut held, mut before) = (0, 0, 0);
    let mut grows = false;
    for (vm, decision) in vms.iter().zip(&plan.decisions) {
        assert_eq!((&vm.vm, vm.target, vm.base), (&decision.vm, decision.from, decision.base));
        assert!(
            decision.to >= vm.base && decision.to <= vm.max.max(vm.base),
            "{decision} of {}",
            vm.max
        );
        assert_eq!((decision.to - vm.base).0 % config.step.0, 0, "{decision}: no whole steps");
        if decision.to > vm.target.max(vm.base) {
            assert!(
                (decision.to - vm.target.max(vm.base)) <= config.step,
                "{decision}: more than a step"
            );
            assert!(vm.size >= vm.target, "{decision}: it has not taken what it got");
            grows |= decision.to > vm.size;
            if config.policy == Policy::Demand {
                assert!(vm.swapped > config.swap, "{decision}: it does not swap");
            }
        }
        told += u128::from((decision.to - vm.base).0);
        held += u128::from(decision.to.max(vm.size).saturating_sub(vm.base).0);
        before += u128::from(vm.target.max(vm.size).saturating_sub(vm.base).0);
        assert!(decision.to_string().starts_with(decision.vm.as_str()));
    }
    let (bytes, awaited) = (u128::from(surplus.bytes.0), u128::from(surplus.awaited.0));
    assert!(told <= bytes, "{told} handed out of {bytes}: {plan:?}");
    assert!(held <= before.max(bytes), "more is held beyond the surplus: {plan:?}");
    if grows {
        assert!(
            held + awaited + u128::from(config.keep.0) <= bytes,
            "grown by what is not there: {plan:?}"
        );
    }
    assert_eq!(u128::from(plan.cache.handed.0), held);
    assert_eq!(u128::from(plan.deficit.0), held.saturating_sub(bytes));
    assert_eq!(u128::from(plan.cache.size.0), bytes.saturating_sub(held + awaited));
    let json = serde_json::to_string(plan).expect("a plan can be written");
    assert_eq!(&serde_json::from_str::<Plan>(&json).expect("and read again"), plan);
}
