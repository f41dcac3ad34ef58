//! Tests of the account of a host's memory, and of the decisions that it explains.

use std::fs;
use std::process::Stdio;

use aquifer_api::message::MemBorReq;
use aquifer_api::path;
use aquifer_api::status::{Decision, Ledger};
use aquifer_page::{Bytes, Group};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::framework::{Answer, Cluster, Host, Identity, Spec, lacks_rights, wait_for, wait_until};
use crate::common::{Export, serve};

/// A host `b` with promises of its own, and an absent peer `a` in whose name the test asks it.
struct Scene {
    cluster: Cluster,
    /// The lender of the region.
    _export: Export,
}

impl Scene {
    fn set() -> Self {
        let b = Spec::new("b").memory(Bytes::gib(1)).set("vms", "balance", true);
        let cluster = Cluster::admitted([Spec::new("a"), b]);
        cluster["b"].start();
        cluster["b"].wait_until_ready();
        let socket = format!("unix:{}", cluster.dir().join("lender").display());
        let export = serve(cluster.dir(), &["128M", "--nbd", &socket]);
        Self { cluster, _export: export }
    }

    fn host(&self) -> &Host {
        &self.cluster["b"]
    }

    /// Runs a command in the cgroup of `b`, which must succeed.
    #[track_caller]
    fn done(&self, words: &[&str]) -> Value {
        Answer::of(&mut self.host().inside(&[words, &["--json"]].concat())).json()
    }

    fn create_region(&self) -> Value {
        let uri = self._export.uri();
        let words = ["--size", "128M", "--cache", "96M", "--lender", uri];
        self.done(&[&["region", "create", "items"][..], &words].concat())
    }

    fn ledger(&self) -> Ledger {
        self.host().status().ledger
    }

    /// Asks `b` for memory in the name of `a`; returns its decision.
    fn ask(&self, number: u8, size: Bytes) -> Decision {
        let before = self.host().status().history.decisions.len();
        let request = format!("{number:032}").try_into().unwrap();
        let (region, group) = (None, Group::default());
        let request = MemBorReq { request, bytes: size, region, group, goes_first: false };
        let a = Identity::load(&self.cluster["a"].tls());
        a.post(self.host(), path::MEM_BOR_REQ, &request).unwrap();
        wait_for("b decides", || self.host().status().history.decisions.into_iter().nth(before))
    }

    fn why(&self, words: &[&str]) -> Answer {
        Answer::of(&mut self.host().aquifer(&[&["why"], words].concat()))
    }

    fn why_json(&self, name: &str) -> Vec<String> {
        let decisions: Vec<Decision> = self.why(&[name, "--json"]).json();
        decisions.into_iter().map(|decision| decision.what).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for words in [&["region", "rm", "items"][..], &["vm", "stop", "--force", "web"]] {
            Answer::of(&mut self.host().aquifer(words));
        }
    }
}

fn sum(ledger: &Ledger) -> Bytes {
    let Ledger { reserved, vm_floor, vm_elastic, cache_floor, group_surplus, lent, free, .. } =
        *ledger;
    [reserved, vm_floor, vm_elastic, cache_floor, group_surplus, lent, free].into_iter().sum()
}

#[test]
fn the_cache_of_a_region_is_not_lent() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let engine = scene.create_region()["pid"].as_u64().unwrap();
    wait_until("the cache counts", || scene.ledger().cache_floor == Bytes::mib(96));
    let ledger = scene.ledger();
    assert_eq!(sum(&ledger), ledger.total);
    assert_eq!((ledger.total, ledger.overcommitted), (Bytes::gib(1), Bytes::ZERO));
    let text = Answer::of(&mut scene.host().aquifer(&["status"])).stdout;
    assert!(text.contains("Memory by class") && text.contains("CACHE FLOOR"), "{text}");
    assert!(text.contains("96MiB"), "{text}");

    // An engine that does not answer keeps its last figures, and holds nobody up.
    let engine = Pid::from_raw(i32::try_from(engine).unwrap()).unwrap();
    kill_process(engine, Signal::STOP).unwrap();
    let uptime = scene.host().status().agent.uptime_s;
    wait_until("some periods pass", || scene.host().status().agent.uptime_s > uptime + 2.5);
    assert_eq!(scene.ledger().cache_floor, Bytes::mib(96));
    kill_process(engine, Signal::CONT).unwrap();

    scene.done(&["region", "rm", "items"]);
    wait_until("the cache is free", || scene.ledger().cache_floor == Bytes::ZERO);
}

#[test]
fn a_region_gets_no_memory_that_is_lent() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let host = scene.host();
    let grants = scene.ask(1, Bytes::mib(768));
    assert!(grants.what.starts_with("grants 768MiB to a"), "{}", grants.what);
    let mut load = host.load(Bytes::mib(180));
    load.filled();
    wait_until("less is free than the cache takes", || scene.ledger().free < Bytes::mib(96));

    let lender = ["--size", "128M", "--cache", "96M", "--lender", scene._export.uri()];
    let create = [&["region", "create", "items"][..], &lender].concat();
    let refused = Answer::of(&mut host.inside(&create));
    let numbers = "it takes 96MiB of this host's RAM, and ";
    let lent = "768MiB are lent, 768MiB of them recallable";
    refused.must_fail(1, &["creating region 'items'", numbers, lent, "host drain", "--overcommit"]);
    assert!(scene.why_json("items")[0].starts_with("refuses memory to items"));
    assert_eq!(scene.ledger().cache_floor, Bytes::ZERO, "a refused claim counts for nothing");

    // The operator insists. A second region has no room either.
    scene.done(&[&create[..], &["--overcommit"]].concat());
    wait_until("the cache counts", || scene.ledger().cache_floor == Bytes::mib(96));
    assert!(scene.ledger().overcommitted > Bytes::ZERO);
    // A larger cache asks as well. A smaller one takes nothing.
    let resize = |cache| ["region", "resize", "items", "--cache", cache];
    let refused = Answer::of(&mut host.inside(&resize("128M")));
    refused.must_fail(1, &["cache of region 'items'", "MiB of this host's RAM", "--overcommit"]);
    assert_eq!(scene.ledger().cache_floor, Bytes::mib(96));
    scene.done(&resize("64M"));
    wait_until("the smaller cache counts", || scene.ledger().cache_floor == Bytes::mib(64));
    scene.done(&[&resize("128M")[..], &["--overcommit"]].concat());
    wait_until("the larger cache counts", || scene.ledger().cache_floor == Bytes::mib(128));
    scene.done(&["region", "rm", "items"]);
    wait_until("the cache is free", || scene.ledger().cache_floor == Bytes::ZERO);

    // Nobody counts what runs outside the cgroup that the agent watches, or without an agent.
    let create_outside = || {
        let created = Answer::of(&mut host.aquifer(&create));
        assert_eq!(created.code, Some(0), "{created:?}");
        let removed = Answer::of(&mut host.aquifer(&["region", "rm", "items"]));
        assert_eq!(removed.code, Some(0), "{removed:?}");
    };
    create_outside();
    load.free();
    host.kill_agent();
    create_outside();
    host.restart();
}

#[test]
fn a_host_explains_what_its_vm_keeps_it_from_lending() {
    let has_qemu = std::process::Command::new("qemu-system-x86_64").arg("--version").output();
    if lacks_rights() || has_qemu.is_err() {
        return;
    }
    let scene = Scene::set();
    let before = scene.host().status().memory.spare;
    let words = ["--memory", "512M", "--min", "256M", "--cache", "none", "--accel", "tcg"];
    scene.done(&[&["vm", "start", "web"][..], &words].concat());
    wait_until("the VM counts", || scene.ledger().vm_floor == Bytes::mib(256));
    let ledger = scene.ledger();
    assert_eq!((ledger.vm_elastic, sum(&ledger)), (Bytes::mib(256), Bytes::gib(1)));
    let spare = scene.host().status().memory.spare;
    assert!(spare <= ledger.total - Bytes::mib(512) && spare < before, "{spare}, {before}");

    let rejects = scene.ask(1, Bytes::mib(576));
    assert!(rejects.what.contains("by the ledger (of 1GiB, "), "{}", rejects.what);
    assert!(rejects.what.contains("512MiB promised to VMs"), "{}", rejects.what);
    let grants = scene.ask(2, Bytes::mib(64));
    assert!(grants.what.starts_with("grants 64MiB to a"), "{}", grants.what);
    let lease = scene.host().lent().lease.to_string();

    assert_eq!(scene.why_json("web"), [rejects.what.clone(), grants.what.clone()]);
    assert_eq!(scene.why_json("a")[..2], [rejects.what.clone(), grants.what.clone()]);
    assert_eq!(scene.why_json(&lease)[0], grants.what);
    assert_eq!(
        scene.why_json("b"),
        scene
            .why(&["--json"])
            .json::<Vec<Decision>>()
            .into_iter()
            .map(|decision| decision.what)
            .collect::<Vec<_>>()
    );
    let text = scene.why(&["a"]).stdout;
    let first = text.lines().next().unwrap();
    assert!(first.ends_with(&rejects.what) && first.contains("Z  "), "{text}");
    scene.why(&["nobody"]).must_fail(1, &["nobody", "hosts: b, a", "VMs: web", &lease]);

    // Neither this VM nor another gets what is promised.
    let run = |words: &[&str]| Answer::of(&mut scene.host().inside(words));
    let lent = "64MiB are lent";
    run(&["vm", "resize", "web", "--memory", "1G"])
        .must_fail(1, &["resizing VM 'web'", "it takes 512MiB of this", lent, "--overcommit"]);
    run(&["vm", "start", "two", "--memory", "600M", "--accel", "tcg"])
        .must_fail(1, &["starting VM 'two'", "it takes 600MiB of this", lent, "--overcommit"]);
    assert_eq!(scene.ledger().vm_elastic, Bytes::mib(256), "a refusal changes nothing");
    assert!(!scene.host().log_text().contains("panicked"), "the balancer asks the ledger");

    scene.done(&["vm", "stop", "--force", "web"]);
    wait_until("the VM's memory is lent again", || {
        scene.ledger().vm_floor == Bytes::ZERO && scene.ledger().vm_elastic == Bytes::ZERO
    });

    // A VM whose cache the agent sizes counts with its present size.
    let words = ["--memory", "512M", "--max-memory", "1G", "--accel", "tcg"];
    scene.done(&[&["vm", "start", "db"][..], &words].concat());
    wait_until("the VM counts", || scene.ledger().cache_floor == Bytes::mib(512));
    // Until a reading shows the VM, the whole size counts.
    wait_until("the agent refuses what the VM has not", || {
        let refused = run(&["vm", "resize", "db", "--memory", "1G"]);
        refused.must_fail(1, &["resizing VM 'db'", lent, "--overcommit"]);
        refused.stderr.contains("it takes 512MiB of this")
    });
    scene.done(&["vm", "stop", "--force", "db"]);
    wait_until("that VM is gone", || scene.ledger().cache_floor == Bytes::ZERO);
}

#[test]
fn an_export_by_hand_gets_no_memory_that_is_promised() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    scene.create_region();
    wait_until("the cache counts", || scene.ledger().cache_floor == Bytes::mib(96));
    let export = |more: &[&str]| {
        scene.host().inside(&[&["--json", "serve", "export", "--size"][..], more].concat())
    };
    let refused = Answer::of(&mut export(&["2G"]));
    refused.must_fail(1, &["exporting 2GiB", "it takes 2GiB of this", "--overcommit"]);
    assert_eq!(scene.ledger().lent, Bytes::ZERO, "a refused claim counts for nothing");
    let mut refused = export(&["2G"]).stderr(Stdio::null()).spawn().unwrap();
    assert!(!refused.wait().unwrap().success());
    let own = format!("export-{}-", refused.id());
    let names = fs::read_dir("/dev/shm/aquifer").unwrap().map(|it| it.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(&own)).collect();
    assert!(left.is_empty(), "{left:?}");

    let pages = tempfile::tempdir_in("/dev/shm").unwrap();
    let half = ["512M", "--dir", pages.path().to_str().unwrap()];
    let mut first = Export::start(&mut export(&half)).unwrap();
    assert_eq!(scene.ledger().lent, Bytes::mib(512), "it counts before it answers");
    let vm = ["vm", "start", "web", "--memory", "600M", "--accel", "tcg"];
    Answer::of(&mut scene.host().inside(&vm)).must_fail(1, &["512MiB are lent, 0B of them"]);

    // The claim ends soon after a reading has shown the export.
    let uptime = scene.host().status().agent.uptime_s;
    wait_until("some periods pass", || scene.host().status().agent.uptime_s > uptime + 2.5);
    // Pages that a killed export left are served in any case.
    first.end(Signal::KILL).unwrap();
    wait_until("the dead export no longer counts", || scene.ledger().lent == Bytes::ZERO);
    let second = Export::start(&mut export(&["900M", "--overcommit"])).unwrap();
    wait_until("it counts", || scene.ledger().lent == Bytes::mib(900));
    let socket = format!("unix:{}", scene.cluster.dir().join("again").display());
    let again = [&half[..], &["--nbd", &socket]].concat();
    let mut again = Export::start(&mut export(&again)).unwrap();
    wait_until("both count", || scene.ledger().overcommitted > Bytes::mib(256));
    drop(second);
    assert_eq!(again.end(Signal::TERM).unwrap(), Some(0));
    wait_until("nothing is lent", || scene.ledger().lent == Bytes::ZERO);
}
