//! Tests of agents as real processes, driven as an operator, a peer or a stranger would drive them.
//!
//! Each host is an agent with an address on loopback, a memory cgroup as its machine, and
//! directories of its own. The tests check every byte of the hosts' programs. Each file has one
//! subject; `framework` has the common parts.

mod agreements;
mod caches;
mod certificates;
mod clusters;
mod copies;
mod disk_copies;
mod drains;
mod events;
pub mod framework;
mod given_back;
mod joins;
mod keys;
mod lease_moves;
mod ledger;
mod limits;
mod losses;
mod mistakes;
mod names;
mod nvme;
mod overview;
mod people;
mod recalls;
mod regions;
mod restarts;
mod revocations;
mod scanners;
mod sharing;
mod strangers;
mod swap_copies;
mod vm_moves;
mod words;
