//! Tests of a group's services as programs: `aquifer serve disk-cache`, also killed and under
//! QEMU's tools, and `aquifer serve reprovision`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use aquifer_disk_cache as cache;
use aquifer_hosts::Daemon;
use aquifer_hosts::daemon::{DISK_CACHE, GROUP_BALANCER};
use aquifer_nbd::client::{Connection, Target};
use aquifer_page::Bytes;
use aquifer_transport::Address;
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{aquifer, binary, stderr, stdout, wait_until};

fn is_root() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        eprintln!("skipped: needs root");
    }
    is
}

/// A host with a group, in a temporary directory.
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

    /// Makes such a host with a disk of 1 MiB.
    fn with_disk() -> (Self, PathBuf) {
        let host = Self::new();
        let disk = host.dir.path().join("disk");
        fs::write(&disk, vec![1; 1 << 20]).unwrap();
        (host, disk)
    }

    fn aquifer(&self) -> Command {
        let mut command = aquifer(&self.dir.path().join("run"));
        command.env("AQUIFER_GROUPS", self.dir.path().join("groups"));
        command
    }

    /// Returns the command of the group's cache.
    fn cache(&self) -> Command {
        let mut command = self.aquifer();
        command.args(DISK_CACHE).arg("blue");
        command
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/regions/@blue/cache.nbd")
    }

    fn connect(&self, disk: &Path) -> Connection {
        let export = disk.to_str().unwrap().to_owned();
        let target = Arc::new(Target { address: Address::Unix(self.socket()), export, tls: None });
        let mut connection = None;
        wait_until("the cache has seen the end of the disk's last client", || {
            connection = Connection::connect(target.clone(), Duration::from_secs(120)).ok();
            connection.is_some()
        });
        connection.unwrap()
    }

    /// Returns the status of the group's cache.
    fn status(&self) -> Value {
        let shown = self.aquifer().args(["--json", "group", "show", "blue"]).output().unwrap();
        let shown: Value = serde_json::from_str(&stdout(&shown)).unwrap();
        shown["cache"].clone()
    }

    fn has_mounts(&self) -> bool {
        fs::read_to_string("/proc/self/mounts").unwrap().contains(self.dir.path().to_str().unwrap())
    }
}

/// A running cache; its drop ends it.
struct Cache(Daemon);

impl Cache {
    fn start(host: &Host) -> Self {
        let (cache, status) = Self::start_with(host, &["--size", "8M"]);
        assert_eq!((&status["group"], &status["size"]), (&"blue".into(), &(8 << 20).into()));
        cache
    }

    /// Starts a cache; returns it with its first status.
    fn start_with(host: &Host, words: &[&str]) -> (Self, Value) {
        let mut command = host.cache();
        let mut cache = Self(Daemon::start(command.arg("--json").args(words)).unwrap());
        let status = cache.0.report().unwrap();
        (cache, status)
    }

    fn signal(&mut self, signal: Signal) -> Option<i32> {
        self.0.end(signal).unwrap().code()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if self.0.ended_within(Duration::ZERO).is_none() {
            self.signal(Signal::TERM);
        }
    }
}

#[test]
fn a_cache_ends_once_no_vm_needs_it() {
    if !is_root() {
        return;
    }
    let (host, disk) = Host::with_disk();
    let (mut cache, _) = Cache::start_with(&host, &["--until-unused", "5s"]);
    let client = host.connect(&disk);
    assert_eq!(cache.0.ended_within(Duration::from_secs(6)), None);
    drop(client);
    let ended = cache.0.ended_within(Duration::from_secs(60)).unwrap();
    assert!(ended.success() && !host.has_mounts());
}

#[test]
fn written_data_is_there_after_a_cache_is_killed_and_restarted() {
    if !is_root() {
        return;
    }
    let (host, disk) = Host::with_disk();
    let mut expected = fs::read(&disk).unwrap();
    let mut read = vec![0; expected.len()];
    for round in 2..6_u8 {
        let mut cache = Cache::start(&host);
        let second = host.cache().output().unwrap();
        assert!(
            !second.status.success() && stderr(&second).contains("already"),
            "{}",
            stderr(&second)
        );
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
    let (host, disk) = Host::with_disk();
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
    assert!(
        file[100..5100] == [2; 5000]
            && file[..100] == [1; 100]
            && file[64 << 10..][..1000] == [0; 1000]
    );

    let client = host.connect(&disk);
    let both = qemu_io(disk.to_str().unwrap(), &["read 0 512"]);
    assert!(!both.status.success() && stderr(&both).contains("lock"), "{both:?}");
    let both = qemu_io(&export, &["read 0 512"]);
    assert!(stderr(&both).contains("open for writing"), "{both:?}");
    drop(client);
    wait_until("QEMU can open the disk", || {
        qemu_io(disk.to_str().unwrap(), &["read 0 512"]).status.success()
    });
}

#[test]
fn a_cache_borrows_from_a_cache_that_is_killed_and_restarted() {
    if !is_root() {
        return;
    }
    let (here, there) = (Host::new(), Host::new());
    let agreement = "groups/blue.toml";
    fs::copy(there.dir.path().join(agreement), here.dir.path().join(agreement)).unwrap();
    let cluster = here.dir.path().join("cluster");
    let members = [("here", [127, 0, 0, 1].into()), ("there", [127, 0, 0, 2].into())];
    binary().init(&cluster, members).unwrap();
    let tls =
        ["here", "there"].map(|host| cluster.join(host).join("tls").to_str().unwrap().to_owned());
    let lends =
        |at: &str| Cache::start_with(&there, &["--size", "8M", "--lend", at, "--tls", &tls[1]]);
    let (mut lender, status) = lends("127.0.0.1:0");
    let address = status["lends"][0].as_str().unwrap().to_owned();
    let uri = format!("nbds://{address}/");
    let borrows = ["--size", "1M", "--lender", &uri, "--lender-host", "there", "--tls", &tls[0]];
    let _cache = Cache::start_with(&here, &borrows).0;

    let disk = here.dir.path().join("disk");
    let mut expected: Vec<u8> = (0..6_u64 << 17).flat_map(u64::to_le_bytes).collect();
    fs::write(&disk, &expected).unwrap();
    let mut client = here.connect(&disk);
    let mut read = vec![0; expected.len()];
    let mut before = 0;
    for round in 0..3_u8 {
        wait_until("pages are read from the lender", || {
            client.read(0, &mut read).unwrap();
            assert!(read == expected, "round {round}");
            here.status()["lenders"][0]["read_bytes"].as_u64().unwrap() > before + (4 << 20)
        });
        let told = there.status();
        assert!(told["lent"].as_u64().unwrap() > 1 << 20, "{told} {}", here.status());
        let range = usize::from(round) * 100_003..usize::from(round) * 200_003 + 70_001;
        expected[range.clone()].fill(round);
        client.write(range.start as u64, &expected[range]).unwrap();
        client.read(0, &mut read).unwrap();
        assert!(read == expected, "round {round}");
        assert_eq!(lender.signal(Signal::KILL), None);
        client.read(0, &mut read).unwrap();
        assert!(read == expected, "round {round}");
        assert_eq!(here.status()["lenders"][0]["answers"], false);
        before = here.status()["lenders"][0]["read_bytes"].as_u64().unwrap();
        lender = lends(&address).0;
    }
    assert_eq!(here.status()["lenders"][0]["wrong_bytes"], 0);
}

#[test]
fn a_cache_neither_lends_nor_borrows_where_it_would_not_be_safe() {
    let host = Host::new();
    for (words, why) in [
        (&["--lend", "0.0.0.0:0"][..], "give --tls DIR"),
        (&["--lender", "nbds://b.example.org/"], "give --tls DIR"),
        (&["--lender", "nbd://b.example.org/", "--tls", "/"], "write nbds://"),
        (&["--borrow", "2G"], "--lender"),
    ] {
        let refused = host.cache().args(words).output().unwrap();
        assert!(
            !refused.status.success() && stderr(&refused).contains(why),
            "{}",
            stderr(&refused)
        );
    }
}

#[test]
fn a_balancer_hands_out_savings_and_corrects_its_predecessor() {
    if !is_root() {
        return;
    }
    let host = Host::new();
    // The cache has a size that it got while its group had members.
    let _cache = Cache::start_with(&host, &[]).0;
    let resized = cache::resize(
        &host.dir.path().join("run/regions"),
        &"blue".parse().unwrap(),
        Bytes::mib(4),
    );
    assert_eq!(resized.unwrap().unwrap().size, Bytes::mib(4));
    let billing = host.dir.path().join("run/regions/@blue/cpu_billing");
    fs::write(&billing, r#"{"group":"red","cgroup":null}"#).unwrap();
    let balance = |words: &[&str]| {
        let mut command = host.aquifer();
        command.arg("--json").args(GROUP_BALANCER).args(["--period", "50ms"]).args(words);
        command
    };
    let dry = balance(&["--dry-run", "--periods", "2"]).output().unwrap();
    assert!(dry.status.success() && billing.exists(), "{}", stderr(&dry));
    let mut first: Daemon = Daemon::start(&mut balance(&[])).unwrap();
    let report = first.report().unwrap().to_string();
    assert!(report.contains("blue") && !billing.exists(), "{report}");
    assert_eq!(host.status()["size"], 0);
    for words in [&[][..], &["--undo"]] {
        let second = balance(words).output().unwrap();
        assert!(
            !second.status.success() && stderr(&second).contains("balances the groups"),
            "{second:?}"
        );
    }
    assert!(balance(&["--dry-run", "--periods", "1"]).output().unwrap().status.success());
    first.end(Signal::KILL).unwrap();
    let next = balance(&["--periods", "1"]).output().unwrap();
    assert!(next.status.success(), "{}", stderr(&next));
}
