//! A VM on this machine with its disks behind its group's cache, which borrows from another host's
//! cache.
//!
//! Needs root and `qemu-img` on this machine.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use aquifer_hosts::Daemon;
use aquifer_hosts::daemon::DISK_CACHE;
use aquifer_page::Bytes;
use aquifer_testbed::{Shell as _, Spec, wait_until};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::{Here, TIMEOUT, binary, step};

/// Size of the disk that the guest copies.
const DISK_SIZE: Bytes = Bytes::mib(32);

#[test]
fn a_guest_waits_for_its_disk_cache_and_finds_its_writes() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let host =
        Here::new(Spec::new("guest").modules(["virtio_blk", "virtio_balloon"]), Bytes::mib(256))?;
    let groups = host.dir.path().join("groups");
    let groups = groups.to_str().context("the path is not UTF-8")?;
    host.done(&["group", "create", "blue", "--groups", groups])?;
    let (from, to) = (host.dir.path().join("from"), host.dir.path().join("to.qcow2"));
    let mut file = File::create(&from)?;
    for block in 0..DISK_SIZE.0 / 8 {
        file.write_all(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())?;
    }
    let mut image = Command::new("qemu-img");
    let made = image
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&to)
        .arg(DISK_SIZE.0.to_string())
        .status()?;
    ensure!(made.success(), "qemu-img did not create an image");

    let (lender, from_name) = (host.lender(), from.to_str().context("the path is not UTF-8")?);
    let to_name = to.to_str().context("the path is not UTF-8")?;
    let disks = ["--cached-disk", from_name, "--cached-disk", to_name];
    let memory = ["--memory", "160M", "--cache", "160M", "--lender", &lender];
    let words = [&memory[..], &["--group", "blue", "--groups", groups], &disks].concat();
    let refused =
        host.start("one", &words, &[]).err().context("the VM started without a cache")?.to_string();
    ensure!(refused.contains("'aquifer serve disk-cache blue'"), "{refused}");
    let local = [&["--memory", "160M", "--cache", "none"], &disks[..]].concat();
    let refused = host.start("one", &local, &[]).err();
    let refused = refused.context("a VM outside all groups started with a group's disks")?;
    let refused = refused.to_string();
    ensure!(refused.contains("no VM with '--cache none'"), "{refused}");

    // This machine also plays the other host.
    let other = tempfile::tempdir()?;
    let (mut lending, at) = start_lender(other.path(), groups, "127.0.0.1:0")?;
    let borrows = format!("nbd://{at}/");
    let mut cache = start_cache(&host, groups, &borrows)?;
    let guest = host.start("one", &words, &[])?;
    step("kill the cache while the guest copies one disk to the other");
    for round in 0..3 {
        let copy = "dd if=/dev/vda of=/dev/vdb bs=1M conv=fsync \
                    && echo 3 >/proc/sys/vm/drop_caches \
                    && cmp /dev/vda /dev/vdb && echo copied";
        let copy = guest
            .spawn(&format!("dd if=/dev/zero of=/dev/vdb bs=1M count=32 conv=fsync && {copy}"))?;
        for _ in 0..3 {
            let written = |cache: &Value| cache["written_bytes"].as_u64() > Some(Bytes::mib(4).0);
            wait_until("the guest writes", TIMEOUT, || {
                Ok(written(&host.done(&["group", "show", "blue", "--groups", groups])?["cache"]))
            })?;
            cache.end(Signal::KILL)?;
            cache = start_cache(&host, groups, &borrows)?;
        }
        lending.end(Signal::KILL)?;
        lending = start_lender(other.path(), groups, &at)?.0;
        copy.wait_for("copied", TIMEOUT)?;
        let shown = host.done(&["group", "show", "blue", "--groups", groups])?;
        step(&format!("round {round}: {}", shown["cache"]));
    }
    wait_until("the guest reads blocks from the other host's cache", TIMEOUT, || {
        guest.sh("echo 3 >/proc/sys/vm/drop_caches; cmp /dev/vda /dev/vdb")?;
        let shown = host.done(&["group", "show", "blue", "--groups", groups])?;
        let lender = &shown["cache"]["lenders"][0];
        ensure!(lender["wrong_bytes"] == 0, "{shown}");
        Ok(lender["read_bytes"].as_u64() > Some(DISK_SIZE.0 / 2)
            && shown["cache"]["hits"].as_u64() > Some(1000))
    })?;
    let vm = host.done(&["vm", "show", "one"])?;
    ensure!(vm.to_string().contains(to_name), "{vm}");
    host.done(&["vm", "stop", "--force", "one"])?;
    kill_softly(&mut cache)?;
    kill_softly(&mut lending)?;
    ensure!(!host.has_mounts()?, "the VM left mounts behind");

    let copied = host.dir.path().join("copied");
    let converted =
        Command::new("qemu-img").args(["convert", "-O", "raw"]).args([&to, &copied]).status()?;
    ensure!(
        converted.success() && fs::read(&from)? == fs::read(&copied)?,
        "the copied disk differs from the original"
    );
    Ok(())
}

fn start_cache(host: &Here, groups: &str, lender: &str) -> Result<Daemon> {
    let words = ["--groups", groups, "--size", "16M", "--lender", lender];
    Ok(start(host.dir.path(), &words)?.0)
}

/// Starts a cache as on another host; returns it, and the address at which it lends.
fn start_lender(run_dir: &Path, groups: &str, address: &str) -> Result<(Daemon, String)> {
    let words = ["--groups", groups, "--size", "64M", "--lend", address];
    let (child, status) = start(run_dir, &words)?;
    Ok((child, status["lends"][0].as_str().context("the cache does not lend")?.to_owned()))
}

fn start(run_dir: &Path, words: &[&str]) -> Result<(Daemon, Value)> {
    let mut command = binary().json(run_dir, DISK_CACHE);
    let mut cache = Daemon::start(command.arg("blue").args(words))?;
    let status = cache.report()?;
    Ok((cache, status))
}

fn kill_softly(cache: &mut Daemon) -> Result<()> {
    ensure!(cache.end(Signal::TERM)?.success(), "the cache did not end with success");
    Ok(())
}
