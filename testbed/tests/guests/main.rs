//! Tests that boot guests: each starts its hosts, gives them commands, and checks the results.
//!
//! The tests take minutes, so `cargo test` leaves them out unless they are named. `scripts/test`
//! runs them in a step of its own (testbed/README.md).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod backends;
mod cache;
mod cluster;
mod direct;
mod doctor;
mod fabrics;
mod groups;
mod hello;
mod kills;
mod losses;
mod migrate;
mod nvme_initiator;
mod nvme_target;
mod out_of_memory;
mod resize;
mod sharing;
mod support;
mod vm;
