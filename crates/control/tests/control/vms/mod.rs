//! A host with VMs that carry out a plan at once, and guests that swap pages that do not fit.

use std::collections::BTreeMap;

use aquifer_control::balance::{
    Balancer, Because, Config, Host, Limits, Move, Plan, Reading, SizeDecision,
};
use aquifer_page::Bytes;

pub const SECTION: Bytes = Bytes::mib(128);

/// Returns limits of 64 MiB to 64 GiB, with weight 100.
pub fn limits() -> Limits {
    Limits { min: Bytes::mib(64), max: Bytes::gib(64), weight: 100, reserve: Bytes::ZERO }
}

/// A VM and the state of its guest, in MiB.
#[derive(Clone, Debug)]
pub struct Vm {
    pub size: u64,
    /// The use of the guest's programs, whether it fits or not.
    pub load: u64,
    /// The memory that the guest's kernel does not count.
    pub kept: u64,
    pub wish: u64,
    pub pressure: Option<f64>,
    pub limits: Limits,
    pub answers: bool,
    pub busy: bool,
    pub swapped: u64,
    pub swap_in: u64,
    pub swap_out: u64,
}

impl Vm {
    pub fn new(size: u64, load: u64) -> Self {
        Self {
            size,
            load,
            kept: 0,
            wish: 0,
            pressure: None,
            limits: limits(),
            answers: true,
            busy: false,
            swapped: 0,
            swap_in: 0,
            swap_out: 0,
        }
    }

    /// Returns the total swap traffic, in and out, in MiB.
    pub fn swapping(&self) -> u64 {
        self.swap_in + self.swap_out
    }

    fn run(&mut self) {
        let swapped = self.load.saturating_sub(self.size - self.kept);
        self.swap_out += swapped.saturating_sub(self.swapped);
        self.swap_in += self.swapped.saturating_sub(swapped);
        self.swapped = swapped;
    }

    pub fn reading(&self, name: &str) -> Reading {
        let total = self.size - self.kept;
        Reading {
            vm: name.parse().expect("the test names it well"),
            size: Bytes::mib(self.size),
            total: Bytes::mib(total),
            available: Bytes::mib(total - (self.load - self.swapped)),
            swap_in: self.swap_in << 20,
            swap_out: self.swap_out << 20,
            swap_used: Bytes::mib(self.swapped),
            pressure: self.pressure,
            wish: Bytes::mib(self.wish),
            limits: self.limits,
            answers: self.answers,
            busy: self.busy,
        }
    }
}

/// VMs under one budget.
pub struct Machine {
    pub vms: BTreeMap<&'static str, Vm>,
    /// For all VMs, in MiB.
    pub budget: u64,
    pub short: bool,
    pub section: Bytes,
    balancer: Balancer,
}

impl Machine {
    pub fn new(
        config: Config,
        budget: u64,
        vms: impl IntoIterator<Item = (&'static str, Vm)>,
    ) -> Self {
        assert_eq!(config.validate(), Ok(()));
        let (vms, balancer) = (vms.into_iter().collect(), Balancer::new(config));
        Self { vms, budget, short: false, section: SECTION, balancer }
    }

    pub fn vm(&mut self, name: &str) -> &mut Vm {
        self.vms.get_mut(name).expect("there is such a VM")
    }

    pub fn size(&self, name: &str) -> u64 {
        self.vms[name].size
    }

    pub fn free(&self) -> u64 {
        self.budget - self.vms.values().map(|vm| vm.size).sum::<u64>()
    }

    /// Lets the guests run and reads them, but does not carry out the plan.
    pub fn look(&mut self) -> Plan {
        self.vms.values_mut().for_each(Vm::run);
        let readings: Vec<Reading> = self.vms.iter().map(|(name, vm)| vm.reading(name)).collect();
        let host = Host {
            sections_free: Bytes::mib(self.free()),
            recallable: Bytes::ZERO,
            section: self.section,
            short: self.short,
        };
        self.balancer.step(&host, &readings)
    }

    /// Runs one period.
    pub fn period(&mut self) -> Plan {
        let plan = self.look();
        for one in &plan.moves {
            let free = self.free();
            let vm = self.vm(one.vm.as_str());
            assert_eq!(one.from, Bytes::mib(vm.size));
            let to = one.to.0 >> 20;
            assert!(to <= vm.size + free, "{one} has only {free} MiB to grow by");
            vm.size = to;
        }
        plan
    }

    /// Runs several periods, and returns their moves.
    pub fn periods(&mut self, periods: usize) -> Vec<Move> {
        (0..periods).flat_map(|_| self.period().moves).collect()
    }
}

/// Writes moves in a short form to compare: `a 1024>1280 Slack`.
pub fn said(moves: &[Move]) -> Vec<String> {
    let mib = |bytes: Bytes| bytes.0 >> 20;
    let why = |because: &Because| match because {
        Because::Grows { want, waits } => {
            let want = format!("{want:?}");
            let word = want.split(' ').next().unwrap_or_default().to_owned();
            if *waits { format!("{word} waits") } else { word }
        }
        Because::Shrinks { give } => format!("{give:?}"),
    };
    moves
        .iter()
        .map(|one| format!("{} {}>{} {}", one.vm, mib(one.from), mib(one.to), why(&one.because)))
        .collect()
}

/// Returns a plan's decision on one VM.
pub fn decision<'a>(plan: &'a Plan, vm: &str) -> &'a SizeDecision {
    plan.decisions.iter().find(|decision| decision.vm.as_str() == vm).expect("each VM has one")
}
