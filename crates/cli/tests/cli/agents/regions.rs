//! Tests of regions whose memory this host's agent borrows, without a named lender.

use std::path::PathBuf;

use aquifer_api::order::{BorrowFor, Provided, Settle};
use aquifer_api::status::{EventKind, Held, Region, Role};
use aquifer_api::{Done, path};
use aquifer_page::{Bytes, Group, VolumeId};
use rustix::process::Signal;
use serde_json::Value;

use super::framework::{Answer, Cluster, Host, Spec, block_on, lacks_rights, wait_for, wait_until};
use crate::region::framework::{MEMORY_PROGRAM, Program};

/// The region's size: two extents.
const SIZE: &str = "96M";
const CACHE: &str = "16M";

/// A host `a` without memory to lend, and lenders.
pub(super) struct Scene(pub(super) Cluster);

impl Scene {
    fn set(lenders: &[&'static str]) -> Self {
        Self::with(Spec::new("a"), lenders)
    }

    /// The same, with more settings for `a`.
    pub(super) fn with(a: Spec, lenders: &[&'static str]) -> Self {
        let a = a.set("lend", "enabled", false);
        let lender = |name: &&'static str| Spec::new(name).memory(Bytes::mib(512));
        Self(Cluster::new([a].into_iter().chain(lenders.iter().map(lender))))
    }

    /// Makes the region 'items', and starts a program that has written to all of it.
    fn with_program(lenders: &[&'static str]) -> (Self, Program) {
        let scene = Self::set(lenders);
        let file = scene.create("items");
        let mut program = scene.program(&file);
        program.does_in_time("write 1");
        (scene, program)
    }

    pub(super) fn a(&self) -> &Host {
        &self.0["a"]
    }

    pub(super) fn run(&self, words: &[&str]) -> Answer {
        Answer::of(&mut self.a().aquifer(words))
    }

    pub(super) fn done(&self, words: &[&str]) -> Value {
        self.run(&[words, &["--json"]].concat()).json()
    }

    pub(super) fn create(&self, name: &str) -> PathBuf {
        let words = ["region", "create", name, "--size", SIZE, "--cache", CACHE];
        PathBuf::from(self.done(&words)["file"].as_str().unwrap())
    }

    /// Starts a program that maps the region.
    pub(super) fn program(&self, region: &std::path::Path) -> Program {
        let disk = self.0.dir().join("disk");
        let (region, disk) = (region.to_str().unwrap(), disk.to_str().unwrap());
        let words = ["region", "exec", "--", "python3", "-c", MEMORY_PROGRAM, region, disk];
        Program::start(&mut self.a().aquifer(&words))
    }

    /// Returns the one region with borrowed memory.
    fn region(&self) -> Region {
        let [region] = self.a().status().loans.regions.try_into().unwrap();
        region
    }

    pub(super) fn held(&self) -> Held {
        let [held] = self.region().leases.try_into().unwrap();
        held
    }

    fn remove(&self, name: &str) {
        wait_until("no program maps the region", || {
            let shown = self.done(&["region", "show", name]);
            shown["programs"].as_array().unwrap().is_empty()
        });
        self.done(&["region", "rm", name]);
    }

    /// Ends the program and removes its region.
    #[track_caller]
    pub(super) fn end(&self, program: Program, lenders: &[&str]) {
        drop(program);
        self.remove("items");
        self.assert_all_free(lenders);
    }

    #[track_caller]
    fn assert_all_free(&self, lenders: &[&str]) {
        wait_until("the lenders have their memory back", || {
            lenders.iter().all(|name| self.0[*name].is_free())
        });
        wait_until("the borrower holds no lease", || self.a().status().loans.regions.is_empty());
    }

    fn ask(&self, volume: VolumeId, bytes: Bytes, directory: PathBuf) -> Result<Provided, String> {
        let region = "by-hand".parse().unwrap();
        let order = BorrowFor { region, volume, bytes, group: Group::default(), directory };
        let asked = block_on(self.a().client().post(path::REGION_BORROW, &order));
        asked.map_err(|error| error.to_string())
    }

    fn settle(&self, volume: VolumeId, exists: bool) -> Result<Done, String> {
        let order = Settle { volume, exists };
        let settled = block_on(self.a().client().post(path::REGION_SETTLE, &order));
        settled.map_err(|error| error.to_string())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for name in ["items", "more"] {
            self.run(&["region", "rm", name]);
        }
        self.run(&["vm", "stop", "--force", "web"]);
    }
}

#[test]
fn a_region_gets_its_memory_from_the_cluster() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set(&["b"]);
    let file = scene.create("items");
    let b = &scene.0["b"];
    let lent = b.lent();
    assert_eq!(lent.region.map(|region| region.to_string()).as_deref(), Some("items"));
    assert_eq!((lent.borrower.as_str(), lent.capacity), ("a", Bytes::mib(128)));
    assert_eq!((scene.a().role(), b.role()), (Role::Neutral, Role::Neutral), "roles are of swap");
    assert_eq!(b.status().ledger.lent, Bytes::mib(128));

    let mut program = scene.program(&file);
    for seed in ["1", "2"] {
        program.does_in_time(&format!("write {seed}"));
        program.does_in_time(&format!("check {seed}"));
    }
    assert!(b.stored() > Bytes::mib(64), "{}", b.stored());
    let held = scene.held();
    assert_eq!((held.lender.as_str(), held.lease), ("b", lent.lease));

    let status = Answer::of(&mut b.aquifer(&["status"])).stdout;
    assert!(status.contains("OWNER") && status.contains("items"), "{status}");
    let status = scene.run(&["status"]).stdout;
    assert!(status.contains("Regions") && status.contains("b: 128MiB of 128MiB"), "{status}");
    let grant = Answer::of(&mut b.aquifer(&["why", "items"])).stdout;
    assert!(grant.contains("grants 128MiB to a for region items as lease"), "{grant}");
    let asked = scene.run(&["why", "items"]).stdout;
    assert!(asked.contains("asks b for 128MiB for region items"), "{asked}");
    let shown = scene.run(&["region", "show", "items"]).stdout;
    assert!(shown.contains("lender") && shown.contains("b at "), "{shown}");

    scene.end(program, &["b"]);
    assert_eq!(b.status().ledger.lent, Bytes::ZERO);
}

#[test]
fn a_drained_lender_s_pages_move_while_a_program_writes() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = Scene::with_program(&["b", "c"]);
    let lender = scene.held().lender.to_string();
    let other = if lender == "b" { "c" } else { "b" };
    program.order("write 2");
    let drained = Answer::of(&mut scene.0[lender.as_str()].aquifer(&["host", "drain", "--json"]));
    assert_eq!(drained.code, Some(0), "{drained:?}");
    assert_eq!(program.answers_in_time(), "write 0");
    assert!(scene.0[lender.as_str()].lease_files().is_empty());
    program.does_in_time("check 2");
    program.does_in_time("write 3");
    program.does_in_time("check 3");
    wait_until("the region has its new lender", || scene.held().lender.as_str() == other);
    assert!(scene.0[other].stored() > Bytes::mib(32));
    let why = scene.run(&["why", "items"]).stdout;
    assert!(why.contains(&format!("asks {other} for 128MiB for region items")), "{why}");
    scene.end(program, &["b", "c"]);
}

#[test]
fn a_move_outlives_the_agents_that_agreed_on_it() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = Scene::with_program(&["b", "c"]);
    let lender = scene.held().lender.to_string();
    let from = &scene.0[lender.as_str()];
    program.order("write 2");
    // The answer tells only that the drain has begun, or that it is over.
    Answer::of(&mut from.aquifer(&["host", "drain", "--timeout", "1ms"]));
    wait_until("the move begins, or is over", || {
        let leases = scene.region().leases;
        leases.len() > 1 || leases.iter().any(|held| held.lender.as_str() != lender)
    });
    scene.a().kill_agent();
    from.kill_agent();
    // The lender forgets its recall with its agent; the configuration makes it drain again.
    from.configure(|config| {
        config["lend"].as_table_mut().unwrap().insert("enabled".to_owned(), false.into());
    });
    from.restart();
    scene.a().restart();
    assert_eq!(program.answers_in_time(), "write 0");
    wait_until("the lender has its memory back", || from.lease_files().is_empty());
    program.does_in_time("check 2");
    assert_ne!(scene.held().lender.as_str(), lender);
    scene.end(program, &["b", "c"]);
}

#[test]
fn a_recall_without_another_lender_keeps_every_page() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = Scene::with_program(&["b"]);
    let b = &scene.0["b"];
    let drain = ["host", "drain", "--timeout", "2s"];
    let drained = Answer::of(&mut b.aquifer(&drain));
    drained.must_fail(1, &["still lent"]);
    program.does_in_time("check 1");
    Answer::of(&mut b.aquifer(&["host", "undrain", "--json"]));
    program.does_in_time("write 2");
    program.does_in_time("check 2");
    scene.end(program, &["b"]);
}

#[test]
fn agents_that_are_killed_find_a_region_s_leases_again() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = Scene::with_program(&["b"]);
    let (a, b) = (scene.a(), &scene.0["b"]);
    let before = b.lent();
    program.order("write 2");
    a.kill_agent();
    a.restart();
    assert_eq!(program.answers_in_time(), "write 0");
    program.does_in_time("check 2");
    wait_until("a finds the lease", || scene.held().lease == before.lease);
    program.order("write 3");
    b.kill_agent();
    b.restart();
    assert_eq!(program.answers_in_time(), "write 0");
    program.does_in_time("check 3");
    let after = b.lent();
    assert_eq!(
        (after.lease, after.region, after.capacity),
        (before.lease, before.region, before.capacity)
    );
    assert_eq!(b.role(), Role::Neutral);

    // Both are away while the region goes: the next agents settle it.
    drop(program);
    a.signal_agent(Signal::TERM);
    scene.remove("items");
    a.restart();
    // The lender asks a borrower that is silent for a quarter of the grace.
    b.configure(|config| {
        config["lend"].as_table_mut().unwrap().insert("grace".to_owned(), "30s".into());
    });
    b.signal_agent(Signal::TERM);
    b.restart();
    scene.assert_all_free(&["b"]);
}

#[test]
fn without_an_agent_or_memory_nothing_is_left_behind() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set(&["b"]);
    let create = ["region", "create", "items", "--cache", CACHE];
    let large = [&create[..], &["--size", "4G"]].concat();
    scene.run(&large).must_fail(1, &["items", "no host lends 4GiB", "b has", "help: "]);
    scene.assert_all_free(&["b"]);
    let over = [&create[..], &["--size", "64G"]].concat();
    scene.run(&over).must_fail(1, &["borrow.max is 16GiB", "help: "]);
    scene.a().kill_agent();
    let small = [&create[..], &["--size", SIZE]].concat();
    scene.run(&small).must_fail(1, &["items", "help: ", "--lender"]);
    assert_eq!(scene.done(&["region", "list"]), Value::Array(Vec::new()));
}

#[test]
fn a_region_that_exists_already_takes_no_memory() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set(&["b"]);
    scene.create("items");
    let lease = scene.0["b"].lent().lease;
    let create = ["region", "create", "items", "--size", SIZE, "--cache", CACHE];
    scene.run(&create).must_fail(1, &["items", "exists"]);
    assert_eq!(scene.0["b"].lent().lease, lease);
    scene.create("more");
    wait_until("both hold a lease", || scene.0["b"].status().loans.lent.len() == 2);
    scene.remove("items");
    wait_for("one lease goes back", || {
        let [lent] = scene.0["b"].status().loans.lent.try_into().ok()?;
        (lent.region?.as_str() == "more").then_some(())
    });
    scene.remove("more");
    scene.assert_all_free(&["b"]);
}

#[test]
fn a_vm_gets_its_memory_from_the_cluster() {
    let qemu = std::process::Command::new("qemu-system-x86_64").arg("--version").output();
    if lacks_rights() || qemu.is_err() {
        return;
    }
    let scene = Scene::set(&["b"]);
    let b = &scene.0["b"];
    let start = ["vm", "start", "web", "--memory", "128M", "--cache", "32M", "--accel", "tcg"];
    let fails = scene.run(&[&start[..], &["--qemu", "/bin/false"]].concat());
    fails.must_fail(1, &["starting VM 'web'"]);
    scene.assert_all_free(&["b"]);
    assert_eq!(scene.done(&["vm", "list"]), Value::Array(Vec::new()));

    scene.done(&start);
    let lent = b.lent();
    assert_eq!(lent.region.map(|region| region.to_string()).as_deref(), Some("web"));
    let shown = scene.run(&["vm", "show", "web"]).stdout;
    assert!(shown.contains("lender") && shown.contains("b at "), "{shown}");
    let moved = scene.run(&["vm", "migrate", "web", "--to", "b"]);
    moved.must_fail(1, &["b lends some of the VM's memory, and cannot lend to itself"]);
    scene.done(&["vm", "stop", "--force", "web"]);
    scene.assert_all_free(&["b"]);
}

#[test]
fn leases_of_a_maker_that_gives_up_go_back() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set(&["b"]);
    let regions = scene.a().state().join("regions");
    let volume = VolumeId::random();
    let provided = scene.ask(volume, Bytes::mib(64), regions.clone()).unwrap();
    assert_eq!(provided.leases.as_array().unwrap().len(), 1);
    assert!(!format!("{provided:?}").contains("key"), "keys are not for logs");
    wait_until("b lends", || scene.0["b"].status().loans.lent.len() == 1);
    // The region does not exist, whatever its maker says.
    let lie = scene.settle(volume, true).unwrap_err();
    assert!(lie.contains("has no record of it"), "{lie}");
    scene.assert_all_free(&["b"]);

    let volume = VolumeId::random();
    scene.ask(volume, Bytes::mib(64), regions).unwrap();
    scene.settle(volume, false).unwrap();
    scene.settle(volume, false).unwrap();
    scene.assert_all_free(&["b"]);
    let late = scene.settle(volume, true).unwrap_err();
    assert!(late.contains("gave the leases back"), "{late}");
    let elsewhere = scene.ask(volume, Bytes::mib(64), "/elsewhere/regions".into()).unwrap_err();
    assert!(elsewhere.contains("does not look at regions in /elsewhere"), "{elsewhere}");
}

#[test]
fn a_lost_lease_of_a_region_is_an_event() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set(&["b"]);
    scene.create("items");
    let b = &scene.0["b"];
    b.kill_agent();
    for file in b.lease_files() {
        let _ = std::fs::remove_file(file);
    }
    b.restart();
    wait_until("a notices", || {
        let events = scene.a().status().history.events;
        events.iter().any(|event| event.kind == EventKind::LeaseLost)
    });
    scene.remove("items");
    scene.assert_all_free(&["b"]);
}
