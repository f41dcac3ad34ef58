//! The report of a simulation.

use aquifer_page::{Bytes, HostName};
use serde::Serialize;

/// The result of a simulation. The same scenario gives the same report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The number of hosts.
    pub hosts: usize,
    /// The RAM of each host.
    pub memory: Bytes,
    /// The simulated time, in seconds.
    pub simulated_s: f64,
    /// What happened, and how often.
    pub counts: Counts,
    /// Changes of roles.
    pub role_changes: RoleChanges,
    /// VMs and their moves.
    pub vms: Moves,
    /// The time that hosts used more than T_upper M_t, all hosts together, in seconds.
    pub overloaded_s: f64,
    /// Where memory was.
    #[serde(flatten)]
    pub usage: Usage,
    /// Violated rules. A run ends at the first, without a report.
    pub violations: u64,
}

/// Where memory was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// The demand of all programs and VMs.
    pub demand: Amounts,
    /// Pages of programs and VMs in other hosts' memory.
    pub remote: Amounts,
    /// Pages of programs on disks, in swap areas and spill files. Programs stall that touch them.
    pub on_disk: Amounts,
    /// Free RAM that could have held pages on disks under an omniscient packing.
    pub stranded: Amounts,
    /// The same, for RAM below T_upper only, which hosts may lend.
    pub stranded_below_upper: Amounts,
}

/// How often things happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Events.
    pub steps: u64,
    /// Messages of agents.
    #[serde(flatten)]
    pub network: MessageCounts,
    /// Leases that lenders granted.
    pub grants: u64,
    /// Leases of regions that began to have second copies.
    pub copies: u64,
    /// Leases that lenders recalled.
    pub recalls: u64,
    /// Leases that lenders freed because their borrowers were silent for the grace.
    pub expired: u64,
    /// Crashes of agents.
    pub crashes: u64,
    /// Outages of hosts' networks.
    pub cuts: u64,
    /// The longest time for which a volume did not reach a lease of its, in whole seconds. Outages
    /// of the two hosts, one after the other, add up.
    pub longest_apart_s: u64,
    /// Work that failed.
    pub failures: u64,
    /// Bytes of pages that were in expired leases.
    pub lost_bytes: u64,
}

/// How often agents sent messages, and the network changed them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MessageCounts {
    /// Messages that agents sent: calls and their answers.
    pub messages: u64,
    /// Of these, the questions for offers.
    pub offer_questions: u64,
    /// Messages that the network lost.
    pub lost_messages: u64,
    /// Messages that arrived twice.
    pub duplicates: u64,
}

/// VMs and their moves of VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moves {
    /// All VMs.
    pub total: usize,
    /// Drains of hosts with their VMs.
    pub drains: u64,
    /// Moves away from overloaded hosts.
    pub for_overload: u64,
    /// Moves away from hosts that an operator drains.
    pub for_drains: u64,
    /// Leases that moved with their VMs.
    pub leases: u64,
    /// The most hosts besides its borrower that might use a lease at a time.
    pub most_permitted: usize,
    /// Moves that failed.
    pub failed: u64,
    /// Moves that no host took.
    pub refused: u64,
    /// Moves that the source cancelled.
    pub cancelled: u64,
    /// The shortest time between two moves of one VM for overload, in seconds.
    pub shortest_s: Option<f64>,
}

/// Changes of roles.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleChanges {
    /// All changes.
    pub total: u64,
    /// Changes of a host, on average.
    pub per_host: f64,
    /// The most changes of one host within ten minutes.
    pub most_in_ten_minutes: usize,
    /// The first host with that many.
    pub host: Option<HostName>,
}

/// An amount over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Amounts {
    /// The average over time.
    pub average: Bytes,
    /// The largest value.
    pub most: Bytes,
}
