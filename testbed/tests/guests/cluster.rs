//! The demo of a cluster on this machine: hosts join, lenders recall, a VM moves, and hosts leave,
//! while a guest writes. Then a second guest of its group shares pages with it.
//!
//! Needs root on this machine.

use anyhow::{Context as _, Result, ensure};

use crate::support::demo;

#[test]
fn the_demo_keeps_every_page_while_lenders_change() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let summary = demo("cluster")?;
    ensure!(summary["hosts"] == 4 && summary["files_edited"] == 0, "{summary}");
    ensure!(summary["join_ms"].as_array().is_some_and(|joins| joins.len() == 3), "{summary}");
    ensure!(summary["pages_wrong"] == 0 && summary["ledger_violations"] == 0, "{summary}");
    ensure!(summary["pages_written"].as_u64() > Some(0), "{summary}");
    // Each of four hosts is read for seconds; two of them leave.
    ensure!(summary["ledger_readings"].as_u64() > Some(100), "{summary}");
    ensure!(summary["pages_verified"] == summary["pages_written"], "{summary}");
    ensure!(summary["recalls"].as_u64() >= Some(2) && summary["moves"] == 2, "{summary}");
    // Both guests fill this memory with the same content, and then one of them with other content.
    let equal = 16 << 20;
    ensure!(summary["saved_bytes"].as_u64() >= Some(equal), "{summary}");
    ensure!(summary["shared_bytes"].as_u64() >= Some(2 * equal), "{summary}");
    ensure!(summary["unshared_pages"].as_u64() >= Some(equal / 4096 * 9 / 10), "{summary}");
    ensure!(summary["group_hosts"] == 4, "{summary}");
    let decisions = summary["decisions"].as_array().context("the summary has no decisions")?;
    let says = |host: &str, what: &str| {
        let mut of_host = decisions.iter().filter(|decision| decision["host"] == host);
        of_host.any(|decision| decision["what"].as_str().is_some_and(|text| text.contains(what)))
    };
    ensure!(says("a", "for region web") && says("a", "overloaded for 8s"), "{summary}");
    ensure!(says("a", "starts a scanner for group blue"), "{summary}");
    let lenders = ["b", "c", "d"];
    ensure!(lenders.iter().all(|host| says(host, "version 1 of its agreement")), "{summary}");
    ensure!(lenders.iter().any(|host| says(host, "is above")), "{summary}");
    ensure!(lenders.iter().any(|host| says(host, "this host is draining")), "{summary}");
    Ok(())
}
