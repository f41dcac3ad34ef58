//! Tests of VMs that move with the memory that their host's agent borrowed.

use std::fs;
use std::process::Command;

use aquifer_api::order::{Awaited, Migrate};
use aquifer_api::path;
use aquifer_api::status::Lent;
use aquifer_hosts::block_on;
use rustix::process::{Pid, Signal, kill_process};

use super::framework::{Answer, Cluster, Host, Spec, wait_until};
use super::vm_moves::lacks_qemu;

/// Hosts `a` and `c` for VMs, and lenders.
struct Scene(Cluster);

impl Scene {
    /// Starts the hosts and the VM 'web' on `a`.
    fn with_a_vm(lenders: &[&'static str]) -> Self {
        let runs = |name| Spec::new(name).set("vms", "accept", true).set("lend", "enabled", false);
        let lends = |name: &&'static str| Spec::new(name).set("vms", "accept", true);
        let hosts = ["a", "c"].map(runs).into_iter().chain(lenders.iter().map(lends));
        let scene = Self(Cluster::new(hosts));
        let start = ["vm", "start", "web", "--memory", "128M", "--cache", "32M", "--accel", "tcg"];
        scene.done("a", &start);
        scene
    }

    fn host(&self, name: &str) -> &Host {
        &self.0[name]
    }

    #[track_caller]
    fn run(&self, host: &str, words: &[&str]) -> Answer {
        Answer::of(&mut self.host(host).aquifer(&[words, &["--json"]].concat()))
    }

    #[track_caller]
    fn done(&self, host: &str, words: &[&str]) {
        let answer = self.run(host, words);
        assert_eq!(answer.code, Some(0), "{answer:?}");
    }

    #[track_caller]
    fn migrate(&self, from: &str, to: &str) {
        self.done(from, &["vm", "migrate", "web", "--to", to]);
    }

    /// Lets a host wait for the VM. Nothing moves: that is up to the VM's supervisor.
    fn introduce(&self, from: &str, to: &str) -> Awaited {
        let (vm, to) = ("web".parse().unwrap(), Some(to.parse().unwrap()));
        let order = Migrate { vm, to, cache: None };
        block_on(self.host(from).client().post(path::MIGRATE, &order)).unwrap()
    }

    /// Kills all processes of the VM on a host, but for its agent.
    fn kill_vm(&self, host: &str) {
        let like = format!("(serve (vm|region).*|qemu.*){}", self.host(host).state().display());
        let find = || Command::new("pgrep").args(["-f", &like]).output().unwrap().stdout;
        wait_until("the VM's processes are dead", || {
            for process in String::from_utf8(find()).unwrap().lines() {
                let process = Pid::from_raw(process.parse().unwrap()).unwrap();
                // It may be dead already.
                let _ = kill_process(process, Signal::KILL);
            }
            find().is_empty()
        });
    }

    fn lent(&self, lender: &str) -> Vec<Lent> {
        self.host(lender).status().loans.lent
    }

    /// Waits until a host's agent holds the lease of the lender, and the other host's none.
    #[track_caller]
    fn held_by(&self, lender: &str, host: &str, other: &str) {
        wait_until("the lease has moved with its VM", || {
            let lent = self.lent(lender);
            lent.iter().all(|lent| lent.borrower.as_str() == host)
                && lent.len() == 1
                && self.host(host).status().loans.regions.len() == 1
                && self.host(other).status().loans.regions.is_empty()
        });
    }

    /// Stops the VM, and waits until all lenders have their memory back.
    #[track_caller]
    fn end(&self, host: &str, lenders: &[&str]) {
        self.done(host, &["vm", "stop", "--force", "web"]);
        wait_until("the lenders have their memory back", || {
            lenders.iter().all(|lender| self.lent(lender).is_empty())
        });
        wait_until("no host holds a lease", || {
            ["a", "c"].iter().all(|host| self.host(host).status().loans.regions.is_empty())
        });
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for host in ["a", "c"] {
            self.run(host, &["vm", "stop", "--force", "web"]);
        }
    }
}

#[test]
fn a_vm_takes_its_leases_along_and_back() {
    if lacks_qemu() {
        return;
    }
    let scene = Scene::with_a_vm(&["b"]);
    let lease = scene.lent("b")[0].lease;
    for (from, to) in [("a", "c"), ("c", "a"), ("a", "c")] {
        scene.migrate(from, to);
        scene.held_by("b", to, from);
        assert_eq!(scene.lent("b")[0].lease, lease);
    }
    scene.end("c", &["b"]);
}

#[test]
fn a_moved_vm_leaves_a_lender_that_recalls() {
    if lacks_qemu() {
        return;
    }
    let scene = Scene::with_a_vm(&["b", "d"]);
    let lends = |name: &str| !scene.lent(name).is_empty();
    let (lender, other) = if lends("b") { ("b", "d") } else { ("d", "b") };
    scene.migrate("a", "c");
    scene.held_by(lender, "c", "a");
    scene.done(lender, &["host", "drain", "--timeout", "60s"]);
    scene.held_by(other, "c", "a");
    scene.end("c", &["b", "d"]);
}

#[test]
fn agents_killed_after_a_move_find_who_holds_the_leases() {
    if lacks_qemu() {
        return;
    }
    let scene = Scene::with_a_vm(&["b"]);
    scene.migrate("a", "c");
    for host in ["a", "b", "c"] {
        scene.host(host).kill_agent();
    }
    for host in ["b", "c", "a"] {
        scene.host(host).start();
    }
    ["a", "b", "c"].iter().for_each(|host| scene.host(host).wait_until_ready());
    scene.held_by("b", "c", "a");
    scene.end("c", &["b"]);
}

#[test]
fn a_move_that_fails_leaves_the_leases_where_they_were() {
    if lacks_qemu() {
        return;
    }
    let scene = Scene::with_a_vm(&["b"]);
    // The destination has no such QEMU.
    scene.host("c").configure(|config| {
        config["vms"].as_table_mut().unwrap().insert("qemu".to_owned(), "/bin/false".into());
    });
    scene.host("c").kill_agent();
    scene.host("c").restart();
    let refused = scene.run("a", &["vm", "migrate", "web", "--to", "c"]);
    refused.must_fail(1, &["c"]);
    scene.held_by("b", "a", "c");
    scene.end("a", &["b"]);
}

#[test]
fn another_attempt_replaces_one_that_nobody_began() {
    if lacks_qemu() {
        return;
    }
    let scene = Scene::with_a_vm(&["b"]);
    let first = scene.introduce("a", "c");
    let second = scene.introduce("a", "c");
    assert_ne!(first.migration, second.migration);
    scene.migrate("a", "c");
    scene.held_by("b", "c", "a");
    scene.end("c", &["b"]);
}

#[test]
fn an_agent_that_dies_while_it_prepares_for_a_vm_leaves_nothing() {
    if lacks_qemu() {
        return;
    }
    let scene = Scene::with_a_vm(&["b"]);
    scene.introduce("a", "c");
    scene.host("c").kill_agent();
    scene.kill_vm("c");
    let vm = scene.host("c").state().join("vms/web");
    assert!(fs::exists(vm.join("record.json")).unwrap());
    scene.host("c").restart();
    assert!(!fs::exists(vm).unwrap());
    assert!(!fs::exists(scene.host("c").state().join("regions/web")).unwrap());
    scene.migrate("a", "c");
    scene.held_by("b", "c", "a");
    scene.end("c", &["b"]);
}
