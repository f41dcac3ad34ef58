//! A VM that moves while it writes to a disk, which its group's cache serves on each host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use aquifer_testbed::wait_until;
use aquifer_vm::Qmp;
use rustix::process::Signal;
use serde_json::json;

use super::{Hosts, lacks_root};
use crate::support::{TIMEOUT, kill, process_like, step};

/// The guest writes blocks of this size in turn.
const BLOCK: usize = 65536;
const BLOCKS: u64 = 64;

#[test]
fn a_vm_moves_with_its_cached_disk() -> Result<()> {
    if lacks_root() {
        return Ok(());
    }
    let (hosts, disk) = start()?;
    goes_on(&hosts, "a")?;
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "instant")] {
        let moved = hosts.done(
            from,
            &["vm", "migrate", "one", "--to", to, "--mode", mode, "--max-downtime", "5s"],
        )?;
        let round = goes_on(&hosts, to)?;
        step(&format!("{from} to {to}, round {round} of the disk: {moved}"));
        let held = &hosts.done(to, &["group", "show", "blue"])?["cache"]["disks"][0]["held"];
        ensure!(held == true, "the disk is not locked: {held}");
        kill(cache(&hosts, from)?, Signal::TERM)?;
        wait_until("the source host is empty", TIMEOUT, || hosts.is_empty(from))?;
    }
    step("move the VM twice while it is paused");
    Qmp::connect(&hosts.run_dir("b").join("vms/one/qmp"), TIMEOUT)?.execute("stop", json!({}))?;
    for (from, to) in [("b", "a"), ("a", "b")] {
        hosts.done(from, &["vm", "migrate", "one", "--to", to, "--mode", "precopy"])?;
        kill(cache(&hosts, from)?, Signal::TERM)?;
        wait_until("the source host is empty", TIMEOUT, || hosts.is_empty(from))?;
    }
    hosts.done("b", &["vm", "resume", "one"])?;
    goes_on(&hosts, "b")?;
    step("kill the cache, which the agent starts again");
    kill(cache(&hosts, "b")?, Signal::KILL)?;
    let round = goes_on(&hosts, "b")?;
    let memory = hosts.goes_on("b", "one")?;
    ensure!(memory[2] == 0, "{memory:?}");
    hosts.done("b", &["vm", "stop", "one", "--force"])?;
    for host in ["a", "b"] {
        if let Ok(cache) = cache(&hosts, host) {
            kill(cache, Signal::TERM)?;
        }
    }
    verify(&disk, round)
}

#[test]
fn caches_that_die_or_hang_during_a_move_lose_nothing() -> Result<()> {
    if lacks_root() {
        return Ok(());
    }
    let (hosts, disk) = start()?;
    goes_on(&hosts, "a")?;
    let (mut here, mut there) = ("a", "b");
    let all = [
        ("here", Signal::KILL, 100),
        ("here", Signal::STOP, 1500),
        ("there", Signal::KILL, 1500),
        ("there", Signal::STOP, 2500),
        ("here", Signal::STOP, 2500),
    ];
    let is_whole = std::env::var("AQUIFER_MATRIX").is_ok_and(|matrix| matrix == "all");
    for (whose, signal, wait_ms) in &all[..if is_whole { all.len() } else { 2 }] {
        let words = ["vm", "migrate", "one", "--to", there, "--mode", "precopy"];
        let moved = thread::scope(|scope| {
            let moving = scope.spawn(|| hosts.ask(here, &words));
            thread::sleep(Duration::from_millis(*wait_ms));
            if let Ok(cache) = cache(&hosts, if *whose == "here" { here } else { there }) {
                kill(cache, *signal)?;
                if *signal == Signal::STOP {
                    // Longer than the move waits for QEMU.
                    thread::sleep(Duration::from_secs(12));
                    kill(cache, Signal::CONT)?;
                }
            }
            moving.join().map_err(|_| anyhow!("the move panicked"))?
        })?;
        let said = String::from_utf8_lossy(&moved.stderr).into_owned();
        step(&format!("{here} to {there}, {whose} {signal:?}: {:?} {said}", moved.status.code()));
        if moved.status.success() {
            (here, there) = (there, here);
        }
        goes_on(&hosts, here)?;
        if let Ok(cache) = cache(&hosts, there) {
            kill(cache, Signal::TERM)?;
        }
        wait_until("the other host is empty", TIMEOUT, || hosts.is_empty(there))?;
    }
    let round = goes_on(&hosts, here)?;
    let memory = hosts.goes_on(here, "one")?;
    ensure!(memory[2] == 0, "{memory:?}");
    hosts.done(here, &["vm", "stop", "one", "--force"])?;
    kill(cache(&hosts, here)?, Signal::TERM)?;
    verify(&disk, round)
}

/// Starts a VM with a cached disk on host a.
fn start() -> Result<(Hosts, PathBuf)> {
    let hosts = Hosts::new()?;
    hosts.done("a", &["group", "create", "blue"])?;
    // These hosts have no cluster whose agents pass agreements on.
    let [from, to] = ["a", "b"].map(|host| hosts.of(host).dir().join("groups"));
    let copied = Command::new("cp").arg("-a").args([from, to]).status()?;
    ensure!(copied.success(), "the agreement could not be copied");
    let disk = hosts.run_dir("a").with_file_name("disk.qcow2");
    let mut image = Command::new("qemu-img");
    let size = (BLOCK as u64 * BLOCKS).to_string();
    let made = image.args(["create", "-q", "-f", "qcow2"]).arg(&disk).arg(size).status()?;
    ensure!(made.success(), "qemu-img did not create an image");
    let path = disk.to_str().context("the path is not UTF-8")?;
    // The agents start the caches.
    hosts.start_pooled("one", &["--group", "blue", "--cached-disk", path])?;
    Ok((hosts, disk))
}

/// Returns the process of a host's disk cache.
fn cache(hosts: &Hosts, host: &str) -> Result<u32> {
    process_like(&format!("{} serve disk-cache", hosts.run_dir(host).display()))
}

/// Waits until the guest has written some more blocks on this host; returns the last one.
fn goes_on(hosts: &Hosts, host: &str) -> Result<u64> {
    let console = hosts.run_dir(host).join("vms/one/console.log");
    let (mut first, mut last) = (None, 0);
    wait_until("the guest writes to its disk", TIMEOUT, || {
        let console = fs::read(&console).context("cannot read the VM's console log")?;
        let console = String::from_utf8_lossy(&console).into_owned();
        let said = console.lines().rev().skip(1).find_map(|line| {
            let (round, wrong) = line.trim().strip_prefix("disk ")?.split_once(' ')?;
            Some((round.parse::<u64>().ok()?, wrong.parse::<u64>().ok()?))
        });
        let Some((round, wrong)) = said else { return Ok(false) };
        ensure!(wrong == 0, "{wrong} blocks were wrong by round {round}");
        last = round;
        // The guest may have written the first block on the host that it came from.
        Ok(round > *first.get_or_insert(round) + 5)
    })?;
    Ok(last)
}

/// Checks the blocks of the last rounds. The guest may have gone on for less than a turn.
fn verify(disk: &Path, round: u64) -> Result<()> {
    let raw = disk.with_extension("raw");
    let converted =
        Command::new("qemu-img").args(["convert", "-O", "raw"]).args([disk, &raw]).status()?;
    ensure!(converted.success(), "qemu-img does not read the image");
    let content = fs::read(&raw)?;
    let block = |round: u64| -> Vec<u8> {
        format!("{round}\n").into_bytes().into_iter().cycle().take(BLOCK).collect()
    };
    let newest = (round..round + BLOCKS)
        .rfind(|round| content.chunks(BLOCK).nth((round % BLOCKS) as usize) == Some(&block(*round)))
        .context("the last block is not on the disk")?;
    for round in newest.saturating_sub(BLOCKS - 2).max(1)..=newest {
        let at = (round % BLOCKS) as usize * BLOCK;
        ensure!(content[at..at + BLOCK] == block(round), "the block of round {round} is wrong");
    }
    Ok(())
}
