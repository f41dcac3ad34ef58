//! A VM of `aquifer vm start`, on this machine: its memory is in the pool, and four times as large as its local cache.
//!
//! Needs root here, and userfaultfd. `AQUIFER_SECONDS` says how long the guest works (20 unless told).

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aquifer_page::Bytes;
use aquifer_testbed::{Guest, Parts, Shell as _, Spec, wait_until};
use serde_json::Value;

use crate::support::{Load, PATIENCE, aquifer, example, step};

const MEMORY: Bytes = Bytes::mib(512);
const CACHE: Bytes = Bytes::mib(128);

/// What the guest's programs have for themselves; most of it is in the pool at any time.
const LOAD: Bytes = Bytes::mib(240);

/// What the guest reads from one disk and writes to another.
const DISK: Bytes = Bytes::mib(48);

#[test]
fn a_guest_works_with_a_quarter_of_its_memory_here_while_its_engine_is_killed_ten_times() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let host = Here::new()?;
    let disks = [host.disk("from", true)?, host.disk("to", false)?];
    let guest = host.start("one", &disks)?;
    let load = Load::start(&guest, LOAD, 4000)?;
    load.filled()?;
    let inside = host.engine("one")?;
    ensure!(bytes(&inside, "resident") <= CACHE.0, "{inside}");

    step(
        "a disk reads into memory that has left, another writes from it, the balloon takes and gives, engines die",
    );
    let seconds = std::env::var("AQUIFER_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut killed = 0;
    for round in 0.. {
        let copy = guest.spawn("dd if=/dev/vda of=/dev/vdb bs=1M conv=fsync && echo 3 >/proc/sys/vm/drop_caches && cmp /dev/vda /dev/vdb && echo copied")?;
        host.balloon("one", if round % 2 == 0 { MEMORY.0 - Bytes::mib(64).0 } else { MEMORY.0 })?;
        load.again();
        for _ in 0..4.min(10 - killed) {
            host.kill_engine("one")?;
            killed += 1;
        }
        load.is_done()?;
        copy.wait_for("copied", PATIENCE)?;
        ensure!(fs::read(&disks[0])? == fs::read(&disks[1])?, "the disk is not what was written to it");
        load.verify()?;
        step(&format!("verified, after {killed} engines that died"));
        if Instant::now() > until && killed == 10 {
            break;
        }
    }
    let status = host.engine("one")?;
    step(&format!("what the last engine did: {}", status["counts"]));
    ensure!(bytes(&status, "resident") <= CACHE.0 && bytes(&status, "remote") > Bytes::mib(64).0, "{status}");

    // What the guest's kernel gives back is given back.
    load.end()?;
    guest.sh("echo 3 >/proc/sys/vm/drop_caches; echo 1 >/proc/sys/vm/compact_memory")?;
    wait_until("what the load had is free in the pool", PATIENCE, || {
        Ok(bytes(&host.engine("one")?, "zero") > LOAD.0)
    })?;

    step("stopping");
    guest.spawn("poweroff -f")?;
    wait_until("QEMU has ended", PATIENCE, || {
        Ok(host.done(&["vm", "show", "one"]).map_or(true, |status| status["state"] != "running"))
    })?;
    step("it is off");
    wait_until("nothing is left of it", PATIENCE, || {
        Ok(host.done(&["vm", "list"])?.as_array().is_some_and(Vec::is_empty) && !host.has_mounts()?)
    })?;
    step("nothing is left of it");
    Ok(())
}

/// A lender on this machine, and a directory for VMs; both are gone at the end.
struct Here {
    dir: tempfile::TempDir,
    pages: PathBuf,
    lender: Child,
    parts: Parts,
}

impl Here {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let spec = Spec::new("guest").file(example("device", "touch"), "/bin/checked-memory");
        let parts = spec.modules(["virtio_blk", "virtio_balloon"]).parts(dir.path())?;
        let pages = tempfile::Builder::new().prefix("aquifer-vm-").tempdir_in("/dev/shm")?.keep();
        let socket = dir.path().join("lender");
        let lender = Command::new(aquifer())
            .args(["export", "640M", "--nbd", &format!("unix:{}", socket.display()), "--dir"])
            .arg(&pages)
            .env("AQUIFER_RUN_DIR", dir.path())
            .stdout(Stdio::null())
            .spawn()?;
        let here = Self { dir, pages, lender, parts };
        wait_until("the lender listens", PATIENCE, || Ok(socket.exists()))?;
        Ok(here)
    }

    fn done(&self, words: &[&str]) -> Result<Value> {
        let output = Command::new(aquifer())
            .args(["--json"])
            .args(words)
            .env("AQUIFER_RUN_DIR", self.dir.path())
            .output()?;
        ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn disk(&self, name: &str, full: bool) -> Result<PathBuf> {
        let path = self.dir.path().join(name);
        let mut file = File::create(&path)?;
        for block in (0..DISK.0 / 8).filter(|_| full) {
            file.write_all(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())?;
        }
        file.set_len(DISK.0)?;
        Ok(path)
    }

    fn start(&self, name: &str, disks: &[PathBuf]) -> Result<Guest> {
        let uri = format!("nbd+unix:///?socket={}", self.dir.path().join("lender").display());
        let (memory, cache) = (MEMORY.0.to_string(), CACHE.0.to_string());
        let text = |path: &Path| path.to_str().context("a path that is no text").map(str::to_owned);
        let (kernel, initrd) = (text(&self.parts.kernel)?, text(&self.parts.initrd)?);
        let mut words = vec!["vm", "start", name, "--memory", &memory, "--cache", &cache, "--lender", &uri];
        words.extend(["--accel", "tcg", "--cpus", "2", "--kernel", &kernel, "--initrd", &initrd]);
        words.extend(["--append", &self.parts.append, "--"]);
        // For direct I/O, which must not reach memory that may leave.
        let disks =
            disks.iter().map(|disk| Ok(format!("if=virtio,format=raw,cache=none,file={}", text(disk)?)));
        let disks = disks.collect::<Result<Vec<_>>>()?;
        words.extend(disks.iter().flat_map(|disk| ["-drive", disk]));
        let line = self.dir.path().join("line");
        let way = self.parts.arguments(&line);
        words.extend(way.iter().map(String::as_str));
        let status = self.done(&words)?;
        let serial = status["serial"].as_str().context("it has no serial port")?;
        Guest::connect(name, &line, Path::new(serial))
    }

    /// What is told of a VM's region.
    fn engine(&self, name: &str) -> Result<Value> {
        self.done(&["region", "show", name])
    }

    fn kill_engine(&self, name: &str) -> Result<()> {
        let pid = self.engine(name)?["pid"].clone();
        let process = pid.as_i64().and_then(|pid| rustix::process::Pid::from_raw(pid as i32));
        rustix::process::kill_process(process.context("no process")?, rustix::process::Signal::KILL)?;
        wait_until("another engine serves", PATIENCE, || {
            Ok(self.engine(name).is_ok_and(|status| status["pid"] != pid))
        })
    }

    /// Has the guest's balloon leave it so much.
    fn balloon(&self, name: &str, bytes: u64) -> Result<()> {
        let status = self.done(&["vm", "show", name])?;
        let qmp = Path::new(status["qmp"].as_str().context("it has no monitor")?);
        let mut qmp = aquifer_guest::Qmp::connect(qmp, PATIENCE)?;
        qmp.execute("balloon", serde_json::json!({ "value": bytes }))?;
        Ok(())
    }

    fn has_mounts(&self) -> Result<bool> {
        Ok(fs::read_to_string("/proc/self/mounts")?.contains(self.dir.path().to_str().context("no text")?))
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        if std::thread::panicking() || self.has_mounts().unwrap_or(false) {
            let logs = "cd $0; tail -n 20 vms/*/log regions/.*/log";
            let _ = Command::new("sh").args(["-c", logs]).arg(self.dir.path()).status();
        }
        for vm in self.done(&["vm", "list"]).ok().iter().filter_map(Value::as_array).flatten() {
            let _ = self.done(&["vm", "stop", "--force", vm["spec"]["name"].as_str().unwrap_or_default()]);
        }
        let _ = self.lender.kill();
        let _ = self.lender.wait();
        let _ = fs::remove_dir_all(&self.pages);
    }
}

fn bytes(region: &Value, of: &str) -> u64 {
    region["usage"][of].as_u64().unwrap_or_default()
}
