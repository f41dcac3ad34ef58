//! Agents as real processes, driven as an operator, a peer or a stranger would drive them.
//!
//! Each host is an agent with an address on loopback, a memory cgroup that plays its machine, and directories of its own;
//! what a host's programs hold is checked byte by byte. One file a subject; `framework` is what they are written with.

mod drains;
mod events;
pub mod framework;
mod given_back;
mod losses;
mod mistakes;
mod names;
mod nvme;
mod recalls;
mod restarts;
mod sharing;
mod strangers;
mod words;
