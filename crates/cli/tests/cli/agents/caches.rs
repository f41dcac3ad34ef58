//! Tests of regions whose cache the host's agent chooses.

mod spills;
mod thin;

use aquifer_api::status::Role;
use aquifer_page::Bytes;
use rustix::process::Signal;
use serde_json::Value;

use super::framework::{Answer, Cluster, Host, Load, Spec, lacks_rights, wait_until};
use crate::region::framework::{MEMORY_PROGRAM, Program};

/// The region's size: two extents.
const SIZE: Bytes = Bytes::mib(96);

/// A host `a` with a region that a program has filled, all of it in RAM of `a`.
struct Scene {
    cluster: Cluster,
    program: Option<Program>,
}

impl Scene {
    fn set(lenders: &[&'static str]) -> Self {
        let lender = |name: &&'static str| Spec::new(name).memory(Bytes::mib(512));
        Self::with(SIZE, Bytes::mib(288), lenders.iter().map(lender))
    }

    /// Sets a region of this size on a host with this memory, beside these lenders.
    fn with(size: Bytes, memory: Bytes, lenders: impl Iterator<Item = Spec>) -> Self {
        let a = Spec::new("a").memory(memory).set("lend", "enabled", false);
        let cluster = Cluster::new([a].into_iter().chain(lenders));
        let mut scene = Self { cluster, program: None };
        let bytes = size.0.to_string();
        let words = ["region", "create", "items", "--size", &bytes, "--cache", "auto", "--json"];
        let made: Value = Answer::of(&mut scene.a().inside(&words)).json();
        let file = made["file"].as_str().unwrap();
        let disk = scene.cluster.dir().join("disk");
        let disk = disk.to_str().unwrap();
        let words = ["region", "exec", "--", "python3", "-c", MEMORY_PROGRAM, file, disk];
        scene.program = Some(Program::start(&mut scene.a().inside(&words)));
        scene.does("write 1");
        assert_eq!(scene.shown("/usage/resident"), size.0);
        scene
    }

    fn a(&self) -> &Host {
        &self.cluster["a"]
    }

    fn does(&mut self, order: &str) {
        self.program.as_mut().unwrap().does_in_time(order);
    }

    /// Returns a figure of the region's status.
    fn shown(&self, pointer: &str) -> u64 {
        let words = ["region", "show", "items", "--json"];
        let status: Value = Answer::of(&mut self.a().aquifer(&words)).json();
        status.pointer(pointer).unwrap().as_u64().unwrap()
    }

    fn cache(&self) -> Bytes {
        Bytes(self.shown("/usage/cache"))
    }

    /// Kills the engine, and waits for the next one.
    fn kill_engine(&self) {
        let engine = self.shown("/pid");
        crate::region::framework::kill(&engine.into());
        wait_until("another engine serves", || {
            let shown = Answer::of(&mut self.a().aquifer(&["region", "show", "items", "--json"]));
            shown.code == Some(0) && shown.json::<Value>()["pid"] != engine
        });
    }

    /// Overloads the host by a program of this size, until pages are at these lenders.
    fn overload(&self, size: Bytes, lenders: &[&str]) -> Load {
        let mut load = self.a().load(size);
        load.filled();
        wait_until("pages are at lenders", || self.stored(lenders) > Bytes::mib(16));
        load
    }

    /// Returns what these lenders hold.
    fn stored(&self, lenders: &[&str]) -> Bytes {
        lenders.iter().map(|name| self.cluster[*name].stored()).sum()
    }

    fn resize(&self, cache: &str) -> Answer {
        Answer::of(&mut self.a().aquifer(&["region", "resize", "items", "--cache", cache]))
    }

    fn why(&self) -> String {
        Answer::of(&mut self.a().aquifer(&["why", "items"])).stdout
    }

    /// Ends the program, and returns its region's memory.
    fn end(&mut self, lenders: &[&str]) {
        self.program = None;
        wait_until("the region is removed", || {
            let removed = Answer::of(&mut self.a().aquifer(&["region", "rm", "items"]));
            removed.code == Some(0)
        });
        wait_until("the lenders have their memory back", || {
            lenders.iter().all(|name| self.cluster[*name].is_free())
        });
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.program = None;
        Answer::of(&mut self.a().aquifer(&["region", "rm", "items"]));
    }
}

#[test]
fn an_overloaded_host_moves_cold_pages_of_its_largest_cache() {
    if lacks_rights() {
        return;
    }
    let mut scene = Scene::set(&["b"]);
    assert!(scene.cluster["b"].is_free(), "nothing is borrowed before a page must leave");

    let mut load = scene.overload(Bytes::mib(160), &["b"]);
    assert!(scene.cache() < SIZE);
    for seed in ["1", "2", "3"] {
        if seed != "1" {
            scene.does(&format!("write {seed}"));
        }
        scene.does(&format!("check {seed}"));
    }
    load.verify();
    let (why, cache) = (scene.why(), scene.cache());
    assert!(why.contains("borrows 128MiB for region items, to shrink its cache"), "{why}");
    assert!(why.contains("shrinks the cache of region items to"), "{why}");
    assert!(cache >= Bytes::mib(24), "the cache keeps a quarter of the region: {cache}");
    // Caches give way before the host swaps.
    assert!(!scene.a().has_volumes());
    assert_eq!(scene.a().role(), Role::Neutral);
    scene.end(&["b"]);
}

#[test]
fn a_shrunk_cache_outlives_agent_and_engine() {
    if lacks_rights() {
        return;
    }
    let mut scene = Scene::set(&["b"]);
    let mut load = scene.overload(Bytes::mib(160), &["b"]);
    scene.a().kill_agent();
    scene.kill_engine();
    scene.does("check 1");
    scene.a().start();
    scene.a().wait_until_ready();
    wait_until("the next agent knows the region", || scene.a().status().loans.regions.len() == 1);
    scene.does("write 2");
    scene.does("check 2");
    assert!(scene.cache() < SIZE);
    load.verify();
    scene.end(&["b"]);
}

#[test]
fn pages_come_home_when_their_only_lender_drains() {
    if lacks_rights() {
        return;
    }
    let mut scene = Scene::set(&["b"]);
    scene.overload(Bytes::mib(160), &["b"]).verify();
    scene.does("write 2");
    let drain = |words: &[&str]| {
        let drained = Answer::of(&mut scene.cluster["b"].aquifer(&[&["host"], words].concat()));
        assert_eq!(drained.code, Some(0), "{drained:?}");
    };
    drain(&["drain"]);
    assert!(scene.cluster["b"].is_free());
    drain(&["undrain"]);
    assert_eq!((scene.cache(), scene.shown("/usage/remote")), (SIZE, 0));
    let why = scene.why();
    assert!(why.contains("so that its pages come home"), "{why}");
    scene.does("check 2");
    // It can borrow again.
    scene.overload(Bytes::mib(160), &["b"]).verify();
    scene.does("write 3");
    scene.does("check 3");
    scene.end(&["b"]);
}

#[test]
fn without_a_lender_a_cache_stays_and_a_smaller_one_is_refused() {
    if lacks_rights() {
        return;
    }
    let mut scene = Scene::set(&[]);
    let refused = scene.resize("32M");
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("96MiB"), "{refused:?}");
    assert_eq!(scene.cache(), SIZE);
    let load = scene.a().load(Bytes::mib(160));
    wait_until("the agent says why the cache stays", || {
        scene.why().contains("cannot change the cache of region items")
    });
    scene.does("check 1");
    scene.does("write 2");
    scene.does("check 2");
    assert_eq!(scene.cache(), SIZE);
    drop(load);
    scene.end(&[]);
}

#[test]
fn an_operator_takes_the_choice_of_a_cache_and_gives_it_back() {
    if lacks_rights() {
        return;
    }
    let mut scene = Scene::set(&["b"]);
    let resized = scene.resize("32M");
    assert_eq!(resized.code, Some(0), "{resized:?}");
    assert_eq!(scene.cache(), Bytes::mib(32));
    assert!(scene.cluster["b"].stored() >= Bytes::mib(48));
    scene.does("check 1");
    let auto = |scene: &Scene| {
        let words = ["region", "show", "items", "--json"];
        let status: Value = Answer::of(&mut scene.a().aquifer(&words)).json();
        status["spec"]["auto"].as_bool().unwrap()
    };
    assert!(!auto(&scene));
    assert_eq!(scene.resize("auto").code, Some(0));
    assert!(auto(&scene));
    // The region has its lender: a death of all its processes loses nothing.
    scene.program.as_ref().unwrap().signal(Signal::CONT);
    scene.does("write 2");
    scene.does("check 2");
    scene.end(&["b"]);
}
