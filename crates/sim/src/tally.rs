//! Sums over all hosts, and their averages over time.

use std::time::Duration;

use aquifer_control::Config;
use aquifer_page::{Bytes, RegionName};

use crate::fleet::Fleet;
use crate::machine::Machine;
use crate::report::{Amounts, Usage};

/// The figures of one host that the sums need, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    demand: u64,
    /// RAM that is free for programs.
    free: u64,
    /// RAM that is free below T_upper.
    spare: u64,
    /// Pages of programs on a disk.
    on_disk: u64,
    /// Pages of programs in other hosts' memory.
    remote: u64,
    /// Hosts that use more than T_upper M_t.
    overloaded: u64,
}

/// One sum over all hosts, with its largest value and its integral over time.
#[derive(Clone, Copy, Debug, Default)]
struct Course {
    most: u64,
    byte_seconds: f64,
}

/// Sums over all hosts.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) fleet: Fleet,
    hosts: Vec<Figures>,
    sum: Figures,
    now: Duration,
    demand: Course,
    on_disk: Course,
    remote: Course,
    stranded: Course,
    stranded_spare: Course,
    overloaded_s: f64,
}

impl Tally {
    pub(crate) fn new(hosts: usize, vms: Vec<RegionName>) -> Self {
        Self {
            fleet: Fleet::new(vms, hosts),
            hosts: vec![Figures::default(); hosts],
            sum: Figures::default(),
            now: Duration::ZERO,
            demand: Course::default(),
            on_disk: Course::default(),
            remote: Course::default(),
            stranded: Course::default(),
            stranded_spare: Course::default(),
            overloaded_s: 0.0,
        }
    }

    /// Adds the time since the last call to the averages.
    pub(crate) fn advance(&mut self, now: Duration) {
        let elapsed_s = now.saturating_sub(self.now).as_secs_f64();
        self.now = now;
        if elapsed_s == 0.0 {
            return;
        }
        let Figures { demand, free, spare, on_disk, remote, overloaded } = self.sum;
        self.overloaded_s += overloaded as f64 * elapsed_s;
        self.demand.add(demand, elapsed_s);
        self.on_disk.add(on_disk, elapsed_s);
        self.remote.add(remote, elapsed_s);
        // An omniscient packing puts any page into any free RAM.
        self.stranded.add(free.min(on_disk), elapsed_s);
        self.stranded_spare.add(spare.min(on_disk), elapsed_s);
    }

    /// Takes the present figures of one host.
    pub(crate) fn set(&mut self, host: usize, machine: &Machine, config: &Config) {
        let upper = machine.total.scaled(config.upper);
        let new = Figures {
            demand: (machine.demand + machine.wanted_by_vms()).0,
            free: machine.free().0,
            spare: upper.saturating_sub(machine.used()).0,
            on_disk: machine.on_disk().0,
            remote: machine.remote().0,
            overloaded: (machine.used() > upper).into(),
        };
        let old = std::mem::replace(&mut self.hosts[host], new);
        let Figures { demand, free, spare, on_disk, remote, overloaded } = &mut self.sum;
        *demand = *demand - old.demand + new.demand;
        *free = *free - old.free + new.free;
        *spare = *spare - old.spare + new.spare;
        *on_disk = *on_disk - old.on_disk + new.on_disk;
        *remote = *remote - old.remote + new.remote;
        *overloaded = *overloaded - old.overloaded + new.overloaded;
    }

    /// Returns the time that hosts were overloaded, all hosts together.
    pub(crate) fn overloaded_s(&self) -> f64 {
        self.overloaded_s
    }

    pub(crate) fn usage(&self) -> Usage {
        let amounts = |course: &Course| course.amounts(self.now);
        Usage {
            demand: amounts(&self.demand),
            remote: amounts(&self.remote),
            on_disk: amounts(&self.on_disk),
            stranded: amounts(&self.stranded),
            stranded_below_upper: amounts(&self.stranded_spare),
        }
    }
}

impl Course {
    fn add(&mut self, bytes: u64, elapsed_s: f64) {
        self.most = self.most.max(bytes);
        self.byte_seconds += bytes as f64 * elapsed_s;
    }

    fn amounts(&self, time: Duration) -> Amounts {
        let average = self.byte_seconds / time.as_secs_f64().max(f64::MIN_POSITIVE);
        Amounts { average: Bytes(average as u64), most: Bytes(self.most) }
    }
}
