//! Tests of leases through the public interface: content, cost, sharing and recovery.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod alone;
mod common;
mod content;
mod cost;
mod example;
mod memory;
mod owners;
mod rank;
mod recovery;
mod sharing;
mod sharing_cost;
mod sharing_killed;
mod sharing_model;
mod sharing_recovery;
mod sharing_times;
mod versions;
