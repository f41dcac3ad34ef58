//! Tests of VMs that hang, die or power themselves off. QEMU's firmware is guest enough.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::{aquifer, done, stderr, stdout, wait_until};
use aquifer_hosts::daemon::VM_BALANCER;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A host's VMs; its drop ends them.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Option<Self> {
        let has_qemu = Command::new("qemu-system-x86_64").arg("--version").output().is_ok();
        if !has_qemu || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root and qemu-system-x86_64");
            return None;
        }
        Some(Self(tempfile::tempdir().unwrap()))
    }

    fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Runs an `aquifer` command that must succeed; returns its answer.
    fn done(&self, words: &[&str]) -> Value {
        done(self.dir(), words)
    }

    /// Starts a VM; returns the process of its QEMU.
    fn start(&self, name: &str, more: &[&str]) -> u32 {
        let words =
            [&["vm", "start", name, "--memory", "32M", "--accel", "tcg"][..], more].concat();
        self.done(&words)["pid"].as_u64().unwrap() as u32
    }

    /// Waits for the end of a VM of this name; returns its record.
    fn end(&self, name: &str) -> String {
        let last = || {
            let all = self.done(&["vm", "list", "--all"]);
            // A VM without a record of its end may still be there.
            let is_it = |vm: &&Value| vm["name"] == name && vm["at_ms"].is_u64();
            all.as_array().unwrap().iter().rfind(is_it).map(Value::to_string)
        };
        wait_until("the VM has ended", || last().is_some());
        last().unwrap()
    }

    /// Returns the VM's supervisor: the parent of its QEMU.
    fn supervisor(qemu: u32) -> u32 {
        let status = fs::read_to_string(format!("/proc/{qemu}/status")).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
        parent.trim().parse().unwrap()
    }
}

fn signal(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
}

/// A process that is stopped until the drop.
struct Stopped(u32);

impl Stopped {
    fn new(process: u32) -> Self {
        signal(process, Signal::STOP);
        Self(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_raw(self.0 as i32).unwrap(), Signal::CONT);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let all = aquifer(self.dir()).args(["--json", "vm", "list"]).output();
        let all =
            all.map(|output| serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default());
        for vm in all.iter().filter_map(Value::as_array).flatten() {
            let name = vm["name"].as_str().unwrap_or_default();
            let _ = aquifer(self.dir()).args(["vm", "stop", "--force", name]).output();
        }
    }
}

#[test]
fn a_vm_that_is_stopped_holds_up_no_other() {
    let Some(host) = Host::new() else { return };
    let silent = host.start("silent", &["--max-memory", "64M"]);
    host.start("other", &["--max-memory", "64M"]);
    let stopped = [Stopped::new(Host::supervisor(silent)), Stopped::new(silent)];
    // More requests than the queues of its monitors and its supervisor hold.
    for _ in 0..3 {
        let turn = host.done(&[VM_BALANCER, &["--periods", "1", "--dry-run"]].concat());
        let silent = turn["silent"].as_object().unwrap();
        assert_eq!(silent.keys().collect::<Vec<_>>(), ["silent"], "{turn}");
        assert!(turn["silent"].to_string().contains("no answer to 'reading' within"), "{turn}");
        let other = turn["decisions"].as_array().unwrap().iter().find(|one| one["vm"] == "other");
        assert!(other.is_some(), "{turn}");
        let budget = host.done(&["vm", "show-budget"]);
        assert_eq!(budget["vms"]["silent"]["local"], 32 << 20, "{budget}");
        let all = host.done(&["vm", "list"]);
        let states: Vec<_> = all.as_array().unwrap().iter().map(|vm| vm["state"].clone()).collect();
        assert_eq!(states, ["running", "unresponsive"], "{all}");
    }
    let refused =
        aquifer(host.dir()).args(["vm", "stop", "silent", "--timeout", "1s"]).output().unwrap();
    assert!(
        !refused.status.success() && stderr(&refused).contains("--force"),
        "{}",
        stderr(&refused)
    );
    drop(stopped);
    host.done(&["vm", "stop", "silent", "--force"]);
    let end = host.end("silent");
    assert!(end.contains("vm stop --force"), "{end}");
}

#[test]
fn a_vm_that_ends_leaves_word_of_when_and_why() {
    let Some(host) = Host::new() else { return };
    let killed = host.start("killed", &[]);
    signal(killed, Signal::KILL);
    let end = host.end("killed");
    assert!(end.contains(r#""signal":9"#), "{end}");

    host.start("off", &[]);
    let mut qmp =
        aquifer_vm::Qmp::connect(&host.dir().join("vms/off/qmp"), Duration::from_secs(60)).unwrap();
    // The record cannot tell a `quit` through the monitor from a guest that powers itself off.
    let _ = qmp.execute("quit", serde_json::json!({}));
    let end = host.end("off");
    assert!(end.contains("powered_off"), "{end}");

    let asked = host.start("asked", &[]);
    signal(asked, Signal::TERM);
    let end = host.end("asked");
    assert!(end.contains(r#""cause":"terminated""#), "{end}");

    host.start("present", &[]);
    let all = host.done(&["vm", "list", "--all"]);
    let names: Vec<_> = all.as_array().unwrap().iter().map(|vm| vm["name"].clone()).collect();
    assert_eq!(names, ["present", "killed", "off", "asked"], "{all}");
    assert_eq!(all[0]["state"], "running", "{all}");

    wait_until("'vm show' says how the VM ended", || {
        let shown = aquifer(host.dir()).args(["vm", "show", "off"]).output().unwrap();
        stdout(&shown).contains("the guest powered itself off")
    });
    let listed = aquifer(host.dir()).args(["vm", "list", "--all"]).output().unwrap();
    assert!(stdout(&listed).contains("signal 9 killed QEMU"), "{}", stdout(&listed));
}

#[test]
fn qemu_runs_in_its_sandbox_unless_told_otherwise() {
    let Some(host) = Host::new() else { return };
    // The number of seccomp filters (proc_pid_status(5)). Memory in a region brings one, too.
    let filters = |qemu: u32| {
        let status = fs::read_to_string(format!("/proc/{qemu}/status")).unwrap();
        let count = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:")).unwrap();
        count.trim().parse::<u32>().unwrap()
    };
    let free = filters(host.start("free", &["--", "-sandbox", "off"]));
    assert_eq!(filters(host.start("boxed", &[])), free + 1);
    assert_eq!(filters(host.start("own", &["--cache", "none", "--", "-sandbox", "off"])), 0);
}

#[test]
fn a_vm_whose_supervisor_was_killed_records_its_end_once() {
    let Some(host) = Host::new() else { return };
    let qemu = host.start("alone", &[]);
    let supervisor = Host::supervisor(qemu);
    signal(supervisor, Signal::KILL);
    wait_until("the VM has lost its supervisor", || Host::supervisor(qemu) != supervisor);
    host.done(&["vm", "stop", "alone", "--force"]);
    let all = host.done(&["vm", "list", "--all"]);
    let [end] = &all.as_array().unwrap()[..] else { panic!("{all}") };
    assert!(end.to_string().contains("vm stop --force") && end["status"].is_null(), "{end}");
}

#[test]
fn a_vm_uses_the_numa_node_that_it_is_given() {
    let Some(host) = Host::new() else { return };
    if !fs::exists("/sys/devices/system/node/node0/cpulist").unwrap() {
        eprintln!("skipped: needs a kernel with NUMA");
        return;
    }
    for (name, more, file) in
        [("pooled", &[][..], "/regions/pooled"), ("local", &["--cache", "none"], "/memfd:")]
    {
        let qemu = host.start(name, &[&["--node", "0"][..], more].concat());
        assert_eq!(host.done(&["vm", "show", name])["node"], 0);
        let shown = aquifer(host.dir()).args(["vm", "show", name]).output().unwrap();
        assert!(stdout(&shown).contains(" on NUMA node 0"), "{}", stdout(&shown));
        // As numa(7) shows it: addresses, policy, file.
        let maps = fs::read_to_string(format!("/proc/{qemu}/numa_maps")).unwrap();
        let memory: Vec<_> = maps.lines().filter(|map| map.contains(file)).collect();
        let is_near = |map: &&str| map.contains(" prefer") && map.contains(":0 file=");
        assert!(!memory.is_empty() && memory.iter().all(is_near), "{memory:?}");
    }
    let words = ["vm", "start", "far", "--memory", "32M", "--accel", "tcg", "--node", "4000"];
    let refused = aquifer(host.dir()).args(words).output().unwrap();
    let why = stderr(&refused);
    assert!(!refused.status.success() && why.contains("no NUMA node 4000"), "{why}");
    let all = host.done(&["vm", "list"]);
    assert_eq!(all.as_array().unwrap().len(), 2, "{all}");
}
