//! A simulated cluster: the nodes of many hosts over one heap of events.
//!
//! Each host runs the very [`Node`](aquifer_control::node::Node) of the agent. Around it, this
//! crate simulates what the agent's driver and the kernel do: RAM, swap, stores, volumes, copies
//! that take time, and a network that loses, delays and duplicates. Agents crash and start again
//! while their volumes go on; the network cuts hosts off.
//!
//! A simulation has no clock and one seed, so the same scenario gives the same report. After each
//! event it checks the rules of [`Rule`] for the hosts that the event touched. The first violation
//! ends the run, with the seed and the latest events of those hosts.
//!
//! - `scenario`, `load`, `vms`: what runs. `report`: what came of it.
//! - `event`, `agenda`: the heap. `simulation`: the loop.
//! - `machine`: what outlives an agent. `shell`: what the agent's driver does around the node.
//! - `invariants`: the rules. `tally`: sums over all hosts. `fleet`: all VMs.

mod agenda;
mod event;
mod fleet;
mod host;
mod invariants;
mod load;
mod machine;
mod report;
mod scenario;
mod shell;
mod simulation;
mod tally;
mod vms;

pub use invariants::{Rule, Violation};
pub use load::{Load, Synthetic, TraceError, read_trace, synthetic_hosts};
pub use report::{Amounts, Counts, MessageCounts, Moves, Report, RoleChanges, Usage};
pub use scenario::{Command, Costs, Faults, Network, Order, Scenario};
pub use simulation::Simulation;
pub use vms::{Backing, VmSpec, synthetic_vms};
