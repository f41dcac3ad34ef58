//! Tests of volumes as block devices, and of swap on them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod allocation;
#[path = "../../../store/tests/store/alone/mod.rs"]
mod alone;
mod backends;
mod common;
#[path = "../../../nbd/tests/nbd/counting/mod.rs"]
mod counting;
mod process;
mod safety;
mod swap;
#[path = "../../examples/touch.rs"]
#[allow(dead_code, reason = "its main is the example's")]
mod touch;
