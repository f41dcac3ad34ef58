//! Tests of `aquifer serve agent --check`: it finds every fault before an agent does.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use aquifer_hosts::daemon::AGENT;
use serde_json::Value;
use toml::Table;

use crate::common::{aquifer, init_two, stderr, stdout};

/// Hosts `a` and `b` of a cluster; the tests check `a`.
struct Host {
    dir: tempfile::TempDir,
    config: Table,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        init_two(dir.path());
        let mut config: Table =
            fs::read_to_string(dir.path().join("a/agent.toml")).unwrap().parse().unwrap();
        let mut set = |key: &str, value: &str| _ = config.insert(key.to_owned(), value.into());
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        set("tls", &path("a/tls"));
        set("socket", &path("agent.sock"));
        set("state", &path("state"));
        // Any free port.
        set("listen", "127.0.0.1:0");
        set("pages", "127.0.0.1:0");
        set("store", &format!("/dev/shm/aquifer/check-{}", std::process::id()));
        let mut host = Self { config, dir };
        host.section("borrow", "spill", &host.path("spill"));
        host.section("groups", "agreements", &host.path("groups"));
        fs::create_dir(host.path("spill")).unwrap();
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn section(&mut self, section: &str, key: &str, value: &Path) {
        let section = self.config.entry(section).or_insert_with(|| Table::new().into());
        section.as_table_mut().unwrap().insert(key.to_owned(), value.to_str().unwrap().into());
    }

    /// Returns the check's exit code and output.
    fn check(&self, more: &[&str]) -> (Option<i32>, String) {
        let file = self.path("agent.toml");
        fs::write(&file, self.config.to_string()).unwrap();
        let mut check = aquifer(self.dir.path());
        let output =
            check.args(AGENT).args(["--check", "--config"]).arg(file).args(more).output().unwrap();
        (output.status.code(), stdout(&output) + &stderr(&output))
    }

    /// Asserts that the check lists these faults and no others.
    #[track_caller]
    fn has(&self, faults: &[(&str, &str)]) {
        let (code, text) = self.check(&["--json"]);
        assert_eq!(code, Some(1), "{text}");
        let report: Value = serde_json::from_str(&text).unwrap();
        let found = |check: &&Value| check["verdict"] == "missing";
        let found: Vec<_> = report["checks"].as_array().unwrap().iter().filter(found).collect();
        assert_eq!(found.len(), faults.len(), "{found:#?}");
        for (check, (name, why)) in found.iter().zip(faults) {
            assert_eq!(check["name"], *name, "{found:#?}");
            assert!(check["found"].as_str().unwrap().contains(why), "no '{why}' in {check:#?}");
            assert!(check["help"].is_string(), "{check:#?}");
        }
    }
}

/// Returns whether no block device can be made here; the check then rightly reports a fault.
fn lacks_devices() -> bool {
    aquifer_blockdev::backend::choose(aquifer_blockdev::BackendKind::Auto).is_err()
}

#[test]
fn a_good_configuration_is_said_to_be_good() {
    if lacks_devices() {
        return;
    }
    let (code, text) = Host::new().check(&[]);
    assert_eq!(code, Some(0), "{text}");
    for named in
        ["certificate", "memory", "listen", "store", "borrow.spill", "peers", "The agent can run"]
    {
        assert!(text.contains(named), "no '{named}' in\n{text}");
    }
}

#[test]
fn a_missing_spill_directory_is_a_warning_and_no_order() {
    if lacks_devices() {
        return;
    }
    let host = Host::new();
    fs::remove_dir(host.path("spill")).unwrap();
    let (code, text) = host.check(&["--json"]);
    assert_eq!(code, Some(0), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let spill = checks.iter().find(|check| check["name"] == "borrow.spill").unwrap();
    let says = |key: &str, what: &str| spill[key].as_str().unwrap().contains(what);
    assert_eq!(spill["verdict"], "warn", "{spill}");
    assert!(says("found", "does not exist: the agent creates it when it starts"), "{spill}");
    assert!(!says("help", "create"), "{spill}");
}

#[test]
fn a_certificate_that_no_peer_would_trust_is_a_fault() {
    if lacks_devices() {
        return;
    }
    let host = Host::new();
    let tls = host.path("a/tls");
    let key = fs::read(tls.join("host.key")).unwrap();
    fs::copy(host.path("b/tls/host.key"), tls.join("host.key")).unwrap();
    host.has(&[("certificate", "host.pem")]);
    fs::write(tls.join("host.key"), key).unwrap();

    let other = Host::new();
    let authority = fs::read(tls.join("ca.pem")).unwrap();
    fs::copy(other.path("a/tls/ca.pem"), tls.join("ca.pem")).unwrap();
    host.has(&[("certificate", "no peer would trust it")]);
    fs::write(tls.join("ca.pem"), authority).unwrap();

    fs::remove_file(tls.join("host.pem")).unwrap();
    host.has(&[("certificate", "host.pem")]);
    fs::remove_dir_all(&tls).unwrap();
    fs::rename(host.path("b/tls"), tls).unwrap();
    host.has(&[("certificate", "the certificate of 'b'")]);
}

#[test]
fn all_faults_are_listed_at_once() {
    if lacks_devices() {
        return;
    }
    let mut host = Host::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut set = |key: &str, value: String| _ = host.config.insert(key.to_owned(), value.into());
    set("listen", taken.local_addr().unwrap().to_string());
    // No host has this address.
    set("pages", "192.0.2.1:7071".to_owned());
    set("store", env!("CARGO_TARGET_TMPDIR").to_owned());
    host.section("memory", "cgroup", Path::new("/sys/fs/cgroup/aquifer-no-such-cgroup"));
    host.section("groups", "agreements", &host.path("a/agent.toml"));
    let spill = host.path("file");
    fs::write(&spill, "").unwrap();
    host.section("borrow", "spill", &spill);
    let peer = |name: &str| {
        Table::from_iter(
            [("name", name), ("address", "127.0.0.2:7070")].map(|(k, v)| (k.to_owned(), v.into())),
        )
    };
    host.config.insert("peer".to_owned(), vec![peer("b"), peer("c")].into());
    host.has(&[
        ("memory", "aquifer-no-such-cgroup"),
        ("listen", "the agent cannot listen"),
        ("pages", "192.0.2.1:7071"),
        ("store", "not on a tmpfs"),
        ("borrow.spill", "not a directory"),
        ("peers", "c has the same address as b"),
        ("groups.agreements", "agent.toml"),
    ]);
    let (code, text) = host.check(&[]);
    assert!(code == Some(1) && text.contains("The agent cannot run"), "{text}");
}
