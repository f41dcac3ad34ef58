//! `aquifer group cache` as a program: that it can be killed at any moment, and what QEMU's tools find.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::Address;
use aquifer_fabric::nbd::client::{Connection, Target};
use common::{aquifer, eventually, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn is_root() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        eprintln!("skipped: needs root");
    }
    is
}

/// A host with a group. Nothing is left of it.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap() };
        let made = host.aquifer().args(["group", "create", "blue"]).output().unwrap();
        assert!(made.status.success(), "{}", stderr(&made));
        host
    }

    fn aquifer(&self) -> Command {
        let mut command = aquifer(&self.dir.path().join("run"));
        command.env("AQUIFER_GROUPS", self.dir.path().join("groups"));
        command
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/regions/@blue/cache.nbd")
    }

    fn connect(&self, disk: &Path) -> Connection {
        let export = disk.to_str().unwrap().to_owned();
        let target = Target { address: Address::Unix(self.socket()), export, tls: None };
        Connection::connect(Arc::new(target), Duration::from_secs(20)).unwrap()
    }

    /// How the cache is, by the group.
    fn status(&self) -> Value {
        let shown = self.aquifer().args(["--json", "group", "show", "blue"]).output().unwrap();
        let shown: Value = serde_json::from_str(&stdout(&shown)).unwrap();
        shown["cache"].clone()
    }

    fn has_mounts(&self) -> bool {
        fs::read_to_string("/proc/self/mounts").unwrap().contains(self.dir.path().to_str().unwrap())
    }
}

/// A running cache. Dropping it ends it.
struct Cache(Child);

impl Cache {
    fn start(host: &Host) -> Self {
        let mut child = host.aquifer();
        child.args(["--json", "group", "cache", "blue", "--size", "8M"]).stdout(Stdio::piped());
        let mut cache = Self(child.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(cache.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let status: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&status["group"], &status["size"]), (&"blue".into(), &(8 << 20).into()));
        cache
    }

    fn signal(&mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
        self.0.wait().unwrap().code()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if self.0.try_wait().unwrap().is_none() {
            self.signal(Signal::TERM);
        }
    }
}

#[test]
fn what_was_written_is_there_when_the_cache_was_killed_and_another_took_its_place() {
    if !is_root() {
        return;
    }
    let host = Host::new();
    let disk = host.dir.path().join("disk");
    fs::write(&disk, vec![1; 1 << 20]).unwrap();
    let mut expected = fs::read(&disk).unwrap();
    let mut read = vec![0; expected.len()];
    for round in 2..6_u8 {
        let mut cache = Cache::start(&host);
        let second = host.aquifer().args(["group", "cache", "blue"]).output().unwrap();
        assert!(!second.status.success() && stderr(&second).contains("already"), "{}", stderr(&second));
        let mut client = host.connect(&disk);
        client.read(0, &mut read).unwrap();
        assert!(read == expected, "round {round}");
        let range = usize::from(round) * 10_007..usize::from(round) * 30_011;
        expected[range.clone()].fill(round);
        client.write(range.start as u64, &expected[range]).unwrap();
        client.flush().unwrap();
        assert_eq!(host.status()["disks"][0]["connections"], 1);
        assert_eq!(cache.signal(Signal::KILL), None);
        assert!(client.read(0, &mut read).is_err());
        assert_eq!(host.status(), Value::Null);
        assert!(fs::read(&disk).unwrap() == expected, "round {round}");
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut cache = Cache::start(&host);
        let _client = host.connect(&disk);
        assert_eq!(cache.signal(signal), Some(0));
        assert!(!host.socket().exists() && !host.has_mounts());
    }
}

#[test]
fn qemu_has_a_disk_by_the_cache_or_without_it_and_never_both() {
    if !is_root() {
        return;
    }
    if Command::new("qemu-io").arg("--version").output().is_err() {
        eprintln!("skipped: needs qemu-io");
        return;
    }
    let host = Host::new();
    let disk = host.dir.path().join("disk");
    fs::write(&disk, vec![1; 1 << 20]).unwrap();
    let _cache = Cache::start(&host);
    let export = format!("nbd:unix:{}:exportname={}", host.socket().display(), disk.display());
    let qemu_io = |image: &str, commands: &[&str]| {
        let mut command = Command::new("qemu-io");
        commands.iter().for_each(|what| _ = command.args(["-c", what]));
        command.args(["-f", "raw", image]).output().unwrap()
    };
    let did = qemu_io(
        &export,
        &[
            "write -P 2 100 5000",
            "write -f -P 3 512k 4k",
            "write -z 64k 1000",
            "discard 128k 64k",
            "flush",
            "read -P 2 100 5000",
            "read -P 0 64k 1000",
            "read -P 1 66536 64",
            "read -P 3 512k 4k",
        ],
    );
    assert!(did.status.success() && !stdout(&did).contains("failed"), "{did:?}");
    let file = fs::read(&disk).unwrap();
    assert!(file[100..5100] == [2; 5000] && file[..100] == [1; 100] && file[64 << 10..][..1000] == [0; 1000]);

    let client = host.connect(&disk);
    let both = qemu_io(disk.to_str().unwrap(), &["read 0 512"]);
    assert!(!both.status.success() && stderr(&both).contains("lock"), "{both:?}");
    let both = qemu_io(&export, &["read 0 512"]);
    assert!(stderr(&both).contains("is written by process"), "{both:?}");
    drop(client);
    eventually("QEMU can open it", || qemu_io(disk.to_str().unwrap(), &["read 0 512"]).status.success());
}
