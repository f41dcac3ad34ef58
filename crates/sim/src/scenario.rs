//! What a simulation runs: hosts, their load, the network, the faults and the costs of copying.

use std::time::Duration;

use aquifer_control::Config;
use aquifer_page::{Bytes, HostName};

use crate::{Load, VmSpec};

/// How long overload lasts before a VM moves, as in the agent.
const MOVE_AFTER: Duration = Duration::from_secs(300);

/// One simulated cluster and its fate.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The hosts, each with the demand of its programs. Every host is a peer of every other.
    pub hosts: Vec<(HostName, Load)>,
    /// The RAM of each host.
    pub memory: Bytes,
    /// The simulated time.
    pub duration: Duration,
    /// The start of all random numbers.
    pub seed: u64,
    /// The monitoring period of each agent.
    pub period: Duration,
    /// The settings of each controller.
    pub config: Config,
    /// The network between agents.
    pub network: Network,
    /// Outages, failures and drains.
    pub faults: Faults,
    /// The times of work.
    pub costs: Costs,
    /// The orders of operators.
    pub orders: Vec<Order>,
    /// The VMs of each host at the start. Hosts beyond its end have none.
    pub vms: Vec<Vec<VmSpec>>,
    /// How long overload lasts before a VM moves to another host; `None` for never.
    pub move_after: Option<Duration>,
}

/// The network between agents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// The probability that the network loses a message.
    pub loss: f64,
    /// The probability that a message arrives twice.
    pub duplication: f64,
    /// The mean delay of a message. A delay is at least half and less than three halves of it. One
    /// message in fifty takes twenty times as long.
    pub delay: Duration,
}

/// Outages, failures and drains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// Crashes of each agent in an hour, on average.
    pub crashes: f64,
    /// How often the network cuts each host off in an hour, on average.
    pub cuts: f64,
    /// The longest outage. The shortest is a tenth of it.
    pub longest: Duration,
    /// The probability that work fails.
    pub failures: f64,
    /// How often the operator drains each host of its VMs in an hour, on average.
    pub drains: f64,
    /// The longest of these drains. The shortest is a tenth of it.
    pub longest_drain: Duration,
}

/// The times of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// The bytes that a host copies over the network in a second.
    pub bandwidth: Bytes,
    /// The longest time to start a volume. The shortest is a quarter of it.
    pub start: Duration,
    /// The longest time to open or to free a lease. The shortest is a tenth of it.
    pub lease: Duration,
    /// How long I/O waits for a lender that does not answer.
    pub io_timeout: Duration,
    /// The share of swapped-out pages that programs touch in a second.
    pub touched: f64,
}

/// An order of a host's operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The time of the order.
    pub at: Duration,
    /// The number of the host in [`Scenario::hosts`].
    pub host: usize,
    /// The order.
    pub command: Command,
}

/// The content of an operator's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Borrow these bytes.
    Borrow(Bytes),
    /// Return all borrowed memory.
    Return,
    /// Recall all leases and lend nothing, or lend again.
    Drain(bool),
    /// The same, and move all VMs away and take none, or take some again.
    Vacate(bool),
    /// Replace the keys of all leases.
    RotateKeys,
    /// No longer count this host of [`Scenario::hosts`] as a peer.
    Part(usize),
    /// Count all hosts as peers again.
    Join,
}

impl Default for Network {
    fn default() -> Self {
        Self { loss: 0.0, duplication: 0.0, delay: Duration::from_millis(1) }
    }
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            crashes: 0.0,
            cuts: 0.0,
            longest: Duration::from_secs(60),
            failures: 0.0,
            drains: 0.0,
            longest_drain: Duration::from_secs(600),
        }
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            bandwidth: Bytes::gib(1),
            start: Duration::from_millis(400),
            lease: Duration::from_millis(50),
            io_timeout: Duration::from_secs(8),
            touched: 0.02,
        }
    }
}

impl Scenario {
    /// Returns a scenario without faults and orders, with the defaults of the agent.
    pub fn new(hosts: Vec<(HostName, Load)>, memory: Bytes, duration: Duration, seed: u64) -> Self {
        let period = Duration::from_secs(1);
        Self {
            hosts,
            memory,
            duration,
            seed,
            period,
            config: Config::with_period(period),
            network: Network::default(),
            faults: Faults::default(),
            costs: Costs::default(),
            orders: Vec::new(),
            vms: Vec::new(),
            move_after: Some(MOVE_AFTER),
        }
    }
}
