//! Hosts with VMs that move, and the lenders of the VMs' memory.

use std::fs;
use std::process::Command;

use aquifer_api::order::{Draining, VmLeftState};
use aquifer_api::path;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::wire::Wire;
use crate::agents::framework::{Answer, Cluster, Host, Spec, block_on, lacks_rights, wait_until};
use crate::common::{Export, serve};

/// A cluster, and a lender behind a wire for each VM; its drop stops the VMs.
pub struct Scene {
    pub cluster: Cluster,
    lenders: Vec<(Wire, Export)>,
}

/// Describes a host that takes VMs, and neither lends nor borrows by itself.
pub fn spec(name: &'static str) -> Spec {
    Spec::new(name).set("vms", "accept", true).set("lend", "enabled", false)
}

/// Returns whether these tests cannot run here.
pub fn lacks_qemu() -> bool {
    let has_qemu = Command::new("qemu-system-x86_64").arg("--version").output().is_ok();
    if !has_qemu {
        eprintln!("skipped: needs qemu-system-x86_64");
    }
    lacks_rights() || !has_qemu
}

impl Scene {
    pub fn new(cluster: Cluster) -> Self {
        Self { cluster, lenders: Vec::new() }
    }

    pub fn host(&self, name: &str) -> &Host {
        &self.cluster[name]
    }

    /// Starts a VM with memory in the pool, within the memory of the host. QEMU's firmware is guest
    /// enough.
    #[track_caller]
    pub fn start(&mut self, host: &str, vm: &str) {
        self.start_with(host, vm, &[]);
    }

    /// Starts a VM in the same way, with further options.
    #[track_caller]
    pub fn start_with(&mut self, host: &str, vm: &str, more: &[&str]) {
        let dir = self.cluster.dir();
        let socket = |what: &str| dir.join(format!("{vm}.{what}"));
        let nbd = format!("unix:{}", socket("lender").display());
        let export = serve(dir, &["64M", "--nbd", &nbd]);
        let wire = Wire::new(&socket("wire"), &socket("lender"));
        let uri = wire.uri();
        self.lenders.push((wire, export));
        let words = ["--memory", "64M", "--cache", "64M", "--accel", "tcg", "--lender", &uri];
        let words = [&["vm", "start", vm][..], &words, more, &["--json"]].concat();
        let started: Value = Answer::of(&mut self.host(host).inside(&words)).json();
        assert_eq!(started["state"], "running", "{started}");
    }

    /// Returns the wire to the lender of the first VM.
    pub fn wire(&self) -> &Wire {
        &self.lenders[0].0
    }

    /// Runs `aquifer WORDS` on a host.
    #[track_caller]
    pub fn run(&self, host: &str, words: &[&str]) -> Answer {
        Answer::of(&mut self.host(host).aquifer(words))
    }

    /// Returns the progress of a host's drain.
    #[track_caller]
    pub fn draining(&self, host: &str) -> Draining {
        let client = self.host(host).client();
        block_on(async { client.get(path::DRAIN).await }).unwrap()
    }

    /// Waits until a VM of a host that drains waits for a reason.
    #[track_caller]
    pub fn waits(&self, host: &str, why: &str) {
        wait_until(&format!("a VM of {host} waits: {why}"), || {
            let vms = self.draining(host).vms;
            vms.iter().any(|vm| vm.state == VmLeftState::Waits && vm.why.contains(why))
        });
    }

    /// Returns the names of the VMs that run on a host.
    #[track_caller]
    pub fn running(&self, host: &str) -> Vec<String> {
        let all: Value = self.run(host, &["vm", "list", "--json"]).json();
        let all = all.as_array().unwrap().iter().filter(|vm| vm["state"] == "running");
        all.map(|vm| vm["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until a host has neither a VM nor a region.
    #[track_caller]
    pub fn is_left(&self, host: &str) {
        wait_until(&format!("{host} has no VM"), || {
            ["vm", "region"].iter().all(|what| {
                let all: Value = self.run(host, &[what, "list", "--json"]).json();
                all.as_array().is_some_and(Vec::is_empty)
            })
        });
    }

    /// Holds the wire, begins to drain a host, and waits until its VM moves to `to` and stands
    /// still there.
    #[track_caller]
    pub fn drain_and_hold(&self, host: &str, to: &str) {
        self.wire().hold();
        self.run(host, &["host", "drain", "--timeout", "0s"]).must_fail(1, &["VM"]);
        wait_until(&format!("the VM moves to {to}"), || {
            self.draining(host).vms.iter().any(|vm| {
                vm.state == VmLeftState::Moves
                    && vm.to.as_ref().is_some_and(|host| host.as_str() == to)
            })
        });
    }

    /// Kills every process of a host, as a crash of the machine would.
    pub fn crash(&self, host: &str) {
        self.host(host).kill_agent();
        let state = self.host(host).state();
        let state = state.to_str().unwrap();
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let command = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let pid = process.file_name().to_str().and_then(|pid| pid.parse().ok());
            if let Some(pid) = pid.and_then(Pid::from_raw)
                && String::from_utf8_lossy(&command).contains(state)
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.lenders.iter().for_each(|(wire, _)| wire.open());
        for host in ["a", "b", "c"].map(|name| self.cluster.find(name)).into_iter().flatten() {
            let all = host.aquifer(&["vm", "list", "--json"]).output();
            let all = all.map(|output| serde_json::from_slice::<Value>(&output.stdout));
            for vm in all.iter().flatten().filter_map(Value::as_array).flatten() {
                let name = vm["name"].as_str().unwrap_or_default();
                let _ = host.aquifer(&["vm", "stop", "--force", name]).output();
            }
        }
    }
}
