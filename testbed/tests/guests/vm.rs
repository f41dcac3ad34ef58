//! A VM of `aquifer vm start` on this machine, with its memory in the pool and four times as large
//! as its local cache.
//!
//! Needs root and userfaultfd on this machine. `AQUIFER_SECONDS` sets how long the guest works
//! (default 20).

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aquifer_page::Bytes;
use aquifer_testbed::{Shell as _, Spec, wait_until};
use serde_json::Value;

use crate::support::{Here, Load, TIMEOUT, example, step};

const MEMORY: Bytes = Bytes::mib(512);
const CACHE: Bytes = Bytes::mib(128);

/// Memory of the guest's programs; most of it is in the pool at any time.
const LOAD: Bytes = Bytes::mib(240);

/// Size of each disk of the guest.
const DISK: Bytes = Bytes::mib(48);

#[test]
fn a_guest_works_with_a_quarter_of_its_memory_here_while_its_engine_is_killed_ten_times()
-> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let spec = Spec::new("guest").file(example("device", "touch"), "/bin/checked-memory");
    let host = Here::new(spec.modules(["virtio_blk", "virtio_balloon"]), Bytes::mib(640))?;
    let disks = [disk(&host, "from", true)?, disk(&host, "to", false)?];
    let (memory, cache, lender) = (MEMORY.0.to_string(), CACHE.0.to_string(), host.lender());
    let words = ["--cpus", "2", "--memory", &memory, "--cache", &cache, "--lender", &lender];
    let guest = host.start("one", &words, &disks)?;
    let load = Load::start(&guest, LOAD, 4000)?;
    load.filled()?;
    let inside = engine(&host, "one")?;
    ensure!(bytes(&inside, "resident") <= CACHE.0, "{inside}");

    step(
        "a disk reads into memory that has left, another writes from it, the balloon takes and gives, engines die",
    );
    let seconds =
        std::env::var("AQUIFER_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut killed = 0;
    for round in 0.. {
        let copy = guest.spawn("dd if=/dev/vda of=/dev/vdb bs=1M conv=fsync && echo 3 >/proc/sys/vm/drop_caches && cmp /dev/vda /dev/vdb && echo copied")?;
        balloon(&host, "one", if round % 2 == 0 { MEMORY.0 - Bytes::mib(64).0 } else { MEMORY.0 })?;
        load.again();
        for _ in 0..4.min(10 - killed) {
            kill_engine(&host, "one")?;
            killed += 1;
        }
        load.is_done()?;
        copy.wait_for("copied", TIMEOUT)?;
        ensure!(
            fs::read(&disks[0])? == fs::read(&disks[1])?,
            "the disk is not what was written to it"
        );
        load.verify()?;
        step(&format!("verified, after {killed} engines that died"));
        if Instant::now() > until && killed == 10 {
            break;
        }
    }
    let status = engine(&host, "one")?;
    step(&format!("what the last engine did: {}", status["counts"]));
    ensure!(
        bytes(&status, "resident") <= CACHE.0 && bytes(&status, "remote") > Bytes::mib(64).0,
        "{status}"
    );

    // Memory that the guest's kernel gives back returns to the pool.
    load.end()?;
    guest.sh("echo 3 >/proc/sys/vm/drop_caches; echo 1 >/proc/sys/vm/compact_memory")?;
    wait_until("what the load had is free in the pool", TIMEOUT, || {
        Ok(bytes(&engine(&host, "one")?, "zero") > LOAD.0)
    })?;

    step("stopping");
    guest.spawn("poweroff -f")?;
    wait_until("QEMU has ended", TIMEOUT, || {
        Ok(host.done(&["vm", "show", "one"]).map_or(true, |status| status["state"] != "running"))
    })?;
    step("it is off");
    wait_until("nothing is left of it", TIMEOUT, || {
        Ok(host.done(&["vm", "list"])?.as_array().is_some_and(Vec::is_empty)
            && !host.has_mounts()?)
    })?;
    step("nothing is left of it");
    Ok(())
}

fn disk(here: &Here, name: &str, full: bool) -> Result<PathBuf> {
    let path = here.dir.path().join(name);
    let mut file = File::create(&path)?;
    for block in (0..DISK.0 / 8).filter(|_| full) {
        file.write_all(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())?;
    }
    file.set_len(DISK.0)?;
    Ok(path)
}

/// Returns the status of a VM's region.
fn engine(host: &Here, name: &str) -> Result<Value> {
    host.done(&["region", "show", name])
}

fn kill_engine(host: &Here, name: &str) -> Result<()> {
    let pid = engine(host, name)?["pid"].clone();
    let process = pid.as_i64().and_then(|pid| rustix::process::Pid::from_raw(pid as i32));
    rustix::process::kill_process(process.context("no process")?, rustix::process::Signal::KILL)?;
    wait_until("another engine serves", TIMEOUT, || {
        Ok(engine(host, name).is_ok_and(|status| status["pid"] != pid))
    })
}

/// Inflates or deflates the guest's balloon so that the guest has `bytes`.
fn balloon(host: &Here, name: &str, bytes: u64) -> Result<()> {
    let status = host.done(&["vm", "show", name])?;
    let qmp = Path::new(status["qmp"].as_str().context("it has no monitor")?);
    let mut qmp = aquifer_vm::Qmp::connect(qmp, TIMEOUT)?;
    qmp.execute("balloon", serde_json::json!({ "value": bytes }))?;
    Ok(())
}

fn bytes(region: &Value, of: &str) -> u64 {
    region["usage"][of].as_u64().unwrap_or_default()
}
