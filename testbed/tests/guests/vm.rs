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

const VM_MEMORY: Bytes = Bytes::mib(512);
const VM_CACHE: Bytes = Bytes::mib(128);

/// Memory of the guest's programs; most of it is in the pool at any time.
const LOAD_SIZE: Bytes = Bytes::mib(240);

/// Size of each disk of the guest.
const DISK_SIZE: Bytes = Bytes::mib(48);

#[test]
fn a_guest_with_a_quarter_local_survives_ten_engine_kills() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let spec = Spec::new("guest").file(example("blockdev", "touch"), "/bin/checked-memory");
    let host = Here::new(spec.modules(["virtio_blk", "virtio_balloon"]), Bytes::mib(640))?;
    let disks = [disk(&host, "from", true)?, disk(&host, "to", false)?];
    let (memory, cache, lender) = (VM_MEMORY.0.to_string(), VM_CACHE.0.to_string(), host.lender());
    let words = ["--cpus", "2", "--memory", &memory, "--cache", &cache, "--lender", &lender];
    let guest = host.start("one", &words, &disks)?;
    let load = Load::start(&guest, LOAD_SIZE, 4000)?;
    load.filled()?;
    let inside = region_status(&host, "one")?;
    ensure!(usage_bytes(&inside, "resident") <= VM_CACHE.0, "{inside}");

    step("disk I/O to and from remote memory, while the balloon changes and engines are killed");
    let seconds =
        std::env::var("AQUIFER_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut killed = 0;
    for round in 0.. {
        let copy = guest.spawn(
            "dd if=/dev/vda of=/dev/vdb bs=1M conv=fsync && echo 3 >/proc/sys/vm/drop_caches \
             && cmp /dev/vda /dev/vdb && echo copied",
        )?;
        let inflated = if round % 2 == 0 { Bytes::mib(64) } else { Bytes::ZERO };
        balloon(&host, "one", VM_MEMORY.0 - inflated.0)?;
        load.again();
        for _ in 0..4.min(10 - killed) {
            kill_engine(&host, "one")?;
            killed += 1;
        }
        load.is_done()?;
        copy.wait_for("copied", TIMEOUT)?;
        ensure!(
            fs::read(&disks[0])? == fs::read(&disks[1])?,
            "the copied disk differs from the original"
        );
        load.verify()?;
        step(&format!("verified after {killed} engine kills"));
        if Instant::now() > until && killed == 10 {
            break;
        }
    }
    let status = region_status(&host, "one")?;
    step(&format!("counts of the last engine: {}", status["counts"]));
    ensure!(
        usage_bytes(&status, "resident") <= VM_CACHE.0
            && usage_bytes(&status, "remote") > Bytes::mib(64).0,
        "{status}"
    );

    // Memory that the guest's kernel gives back returns to the pool.
    load.end()?;
    guest.sh("echo 3 >/proc/sys/vm/drop_caches; echo 1 >/proc/sys/vm/compact_memory")?;
    wait_until("the pool has freed the load's memory", TIMEOUT, || {
        Ok(usage_bytes(&region_status(&host, "one")?, "zero") > LOAD_SIZE.0)
    })?;

    step("stopping");
    guest.spawn("poweroff -f")?;
    wait_until("QEMU has ended", TIMEOUT, || {
        Ok(host.done(&["vm", "show", "one"]).map_or(true, |status| status["state"] != "running"))
    })?;
    step("the VM is off");
    wait_until("nothing is left of the VM", TIMEOUT, || {
        Ok(host.done(&["vm", "list"])?.as_array().is_some_and(Vec::is_empty)
            && !host.has_mounts()?)
    })?;
    step("nothing is left of the VM");
    Ok(())
}

fn disk(here: &Here, name: &str, full: bool) -> Result<PathBuf> {
    let path = here.dir.path().join(name);
    let mut file = File::create(&path)?;
    for block in (0..DISK_SIZE.0 / 8).filter(|_| full) {
        file.write_all(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())?;
    }
    file.set_len(DISK_SIZE.0)?;
    Ok(path)
}

/// Returns the status of a VM's region.
fn region_status(host: &Here, name: &str) -> Result<Value> {
    host.done(&["region", "show", name])
}

fn kill_engine(host: &Here, name: &str) -> Result<()> {
    let pid = region_status(host, name)?["pid"].clone();
    let process = pid.as_i64().and_then(|pid| rustix::process::Pid::from_raw(pid as i32));
    let process = process.context("the region has no engine")?;
    rustix::process::kill_process(process, rustix::process::Signal::KILL)?;
    wait_until("another engine serves the region", TIMEOUT, || {
        Ok(region_status(host, name).is_ok_and(|status| status["pid"] != pid))
    })
}

/// Inflates or deflates the guest's balloon so that the guest has `bytes`.
fn balloon(host: &Here, name: &str, bytes: u64) -> Result<()> {
    let status = host.done(&["vm", "show", name])?;
    let qmp = Path::new(status["qmp"].as_str().context("the VM has no monitor")?);
    let mut qmp = aquifer_vm::Qmp::connect(qmp, TIMEOUT)?;
    qmp.execute("balloon", serde_json::json!({ "value": bytes }))?;
    Ok(())
}

fn usage_bytes(region: &Value, of: &str) -> u64 {
    region["usage"][of].as_u64().unwrap_or_default()
}
