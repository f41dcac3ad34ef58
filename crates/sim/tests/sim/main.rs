//! Tests of simulated clusters: determinism, invariants under faults, and scenes with known ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod faults;
mod scenes;
mod vms;
