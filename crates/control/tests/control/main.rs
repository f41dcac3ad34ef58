//! Tests of the decisions by sequences of events, by random events, and by whole networks of hosts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod algorithms;
mod balance;
mod balance_bounds;
mod balance_rest;
mod group_agreements;
mod group_overhead;
mod group_overhead_bounds;
mod group_reprovision;
mod group_reprovision_bounds;
mod group_scan_rate;
mod host;
mod ledger;
mod mirror;
mod network;
mod node;
mod protocol;
mod regions;
mod restart;
mod sim;
mod tenant;
mod vms;

use proptest::test_runner::Config;

/// Configures a property test: few cases by default; `PROPTEST_CASES=100000` is a long search.
fn cases(few: u32) -> Config {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: cases.unwrap_or(few), failure_persistence: None, ..Config::default() }
}
