//! VMs of two groups on this machine: the host keeps equal pages of a group once, while guests read
//! and write and engines die.
//!
//! Needs root on this machine.

use anyhow::{Context as _, Result, ensure};
use aquifer_hosts::Daemon;
use aquifer_hosts::daemon::SCANNER;
use aquifer_page::Bytes;
use aquifer_testbed::{Guest, Shell as _, Spec};
use serde_json::Value;

use crate::support::{Here, Load, TIMEOUT, binary, demo, example, step};

/// Memory that every guest fills with the same content.
const LOAD_SIZE: Bytes = Bytes::mib(48);

#[test]
fn guests_of_a_group_keep_equal_pages_once_while_engines_die() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let spec = Spec::new("guest").file(example("blockdev", "touch"), "/bin/checked-memory");
    let host = Here::new(spec.modules(["virtio_balloon"]), Bytes::mib(768))?;
    let groups = host.dir.path().join("groups");
    let groups = groups.to_str().context("the path is not UTF-8")?;
    let mut guests: Vec<(&str, Guest, Load)> = Vec::new();
    for group in ["blue", "red"] {
        host.done(&["group", "create", group, "--groups", groups])?;
    }
    for (name, group) in [("one", "blue"), ("two", "blue"), ("three", "red")] {
        step(&format!("{name} of group {group}"));
        let memory = ["--memory", "160M", "--cache", "192M", "--lender", &host.lender_of(name)];
        let guest = host.start(
            name,
            &[&memory[..], &["--group", group, "--groups", groups]].concat(),
            &[],
        )?;
        let load = Load::start(&guest, LOAD_SIZE, 2000)?;
        load.filled()?;
        load.is_done()?;
        guests.push((name, guest, load));
    }
    let host_bytes = |what: &str| -> Result<u64> {
        let of = |(name, ..): &(&str, Guest, Load)| {
            Ok(host.done(&["region", "show", name])?["usage"][what].as_u64().unwrap_or(0))
        };
        guests.iter().map(of).sum()
    };
    let before = host_bytes("resident")?;
    let mut red = scan(&host, "red", groups)?;
    let mut blue = scan(&host, "blue", groups)?;
    // Each guest rewrote two thousand random pages, which may differ.
    let most = LOAD_SIZE.0 - 4096 * 4000;
    let shared = blue.until("equal pages are kept once", TIMEOUT, |report| {
        report["saved_bytes"].as_u64() > Some(most)
    })?;
    step(&format!("blue: {shared}"));
    let alone = red.until("the scanner makes two passes", TIMEOUT, |report| {
        report["passes"].as_u64() >= Some(2)
    })?;
    step(&format!("red: {alone}"));
    // A guest has some equal pages itself. The guest shares none with the other group, although all
    // pages are equal.
    ensure!(alone["saved_bytes"].as_u64() < Some(most / 2), "{alone}");
    ensure!(before - host_bytes("resident")? > most, "{before}");

    step("kill the engines while all guests read and write");
    for round in 0..3 {
        guests.iter().for_each(|(.., load)| load.again());
        for (name, ..) in &guests {
            let pid = host.done(&["region", "show", name])?["pid"].as_i64();
            let pid = pid
                .and_then(|pid| rustix::process::Pid::from_raw(pid as i32))
                .context("the region has no engine")?;
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        }
        for (name, guest, load) in &guests {
            load.is_done()?;
            load.verify()?;
            guest.sh("echo 3 >/proc/sys/vm/drop_caches")?;
            step(&format!("{name} has correct memory in round {round}"));
        }
    }
    let end = blue.until("the equal pages are shared again", TIMEOUT, |report| {
        report["saved_bytes"].as_u64() > Some(most / 4)
            && report["passes"].as_u64() > shared["passes"].as_u64()
    })?;
    step(&format!("blue: {end}"));
    for (name, guest, load) in guests {
        load.verify()?;
        load.end()?;
        ensure!(!guest.sh("dmesg")?.contains("BUG"), "{name}");
        host.done(&["vm", "stop", "--force", name])?;
    }
    drop((blue, red));
    ensure!(!host.has_mounts()?, "the VMs left mounts behind");
    Ok(())
}

#[test]
fn the_demo_gives_savings_to_the_needy_guest_and_cleans_up() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let summary = demo("groups")?;
    ensure!(summary["cross_group_merges"] == 0 && summary["guest_errors"] == 0, "{summary}");
    let number =
        |of: &Value| of.as_u64().with_context(|| format!("a number is missing in {summary}"));
    let base = number(&summary["base_bytes"])?;
    for group in summary["groups"].as_array().context("the summary has no groups")? {
        ensure!(
            number(&group["saved_bytes"])? > 0 && number(&group["mapped_bytes"])? > 0,
            "{summary}"
        );
        ensure!(
            group["scan_pages_per_ms"].is_number() && group["scanner_cpu_pct"].is_number(),
            "{summary}"
        );
        ensure!(group["balloon_bytes"].as_array().is_some_and(|all| all.len() == 2), "{summary}");
        for vm in group["vms"].as_array().context("the group has no VMs")? {
            let is_needy = vm["name"] == summary["need"]["vm"];
            ensure!((number(&vm["most_bytes"])? > base) == is_needy, "{summary}");
        }
    }
    let need = &summary["need"];
    let (got, left) = (number(&need["got_bytes"])?, number(&need["left_bytes"])?);
    ensure!(got > base && left < got, "{summary}");
    ensure!(
        number(&need["swapped_bytes_per_s"])? > 0 && need["swapped_bytes_per_s_after"] == 0,
        "{summary}"
    );
    Ok(())
}

/// Starts a group's scanner; its drop ends it.
fn scan(host: &Here, group: &str, groups: &str) -> Result<Daemon> {
    let mut command = binary().json(host.dir.path(), SCANNER);
    let words = [group, "--groups", groups, "--scan", "100", "--report", "1s"];
    Ok(Daemon::start(command.args(words))?)
}
