//! Tests of the program, driven as an operator, a peer or a stranger would drive it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod agent_check;
mod agents;
mod attach;
mod basics;
mod common;
mod completions;
mod definitions;
mod drills;
mod export;
mod group;
mod openapi;
mod operator;
#[path = "../../../store/tests/store/rank/mod.rs"]
mod rank;
mod region;
mod run;
mod run_pool;
mod simulate;
mod vm;
