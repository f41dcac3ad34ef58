//! Tests of the scanners that an agent runs for the groups of its host.

use std::path::PathBuf;
use std::time::Duration;

use aquifer_api::status::GroupScanner;
use aquifer_hosts::Daemon;
use aquifer_hosts::daemon::SCANNER;
use aquifer_page::Bytes;
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::framework::{Answer, Cluster, Host, Spec, lacks_rights, lives, process, wait_until};
use crate::common::stderr;
use crate::region::framework::{MEMORY_PROGRAM, Program};

/// Bytes of a region that are not zero after `write`: each 64th page is.
const NONZERO: Bytes = Bytes(2016 * 4096);

/// A host with an agent, a group and some regions of it.
struct Scene(Cluster);

impl Scene {
    fn set() -> Self {
        let scene = Self(Cluster::new([Spec::new("a")]));
        scene.done(&["group", "create", "blue", "--scan", "100"]);
        scene
    }

    fn a(&self) -> &Host {
        &self.0["a"]
    }

    fn done(&self, words: &[&str]) -> Value {
        Answer::of(&mut self.a().aquifer(&[words, &["--json"]].concat())).json()
    }

    /// Makes a region of the group, and starts a program that fills it with the same as all others.
    fn fill(&self, name: &str) -> Program {
        let made = ["region", "create", name, "--size", "8M", "--cache", "16M"];
        let made = [&made[..], &["--emulate-link", "1us", "--group", "blue"]].concat();
        let file = PathBuf::from(self.done(&made)["file"].as_str().unwrap());
        let disk = self.0.dir().join("disk");
        let (file, disk) = (file.to_str().unwrap(), disk.to_str().unwrap());
        let words = ["region", "exec", "--", "python3", "-c", MEMORY_PROGRAM, file, disk];
        let mut program = Program::start(&mut self.a().aquifer(&words));
        program.does_in_time("write 1");
        program
    }

    fn remove(&self, name: &str) {
        wait_until("no program maps the region", || {
            let shown = self.done(&["region", "show", name]);
            shown["programs"].as_array().unwrap().is_empty()
        });
        self.done(&["region", "rm", name]);
    }

    fn scanner(&self) -> Option<GroupScanner> {
        let [scanner] = self.a().status().scanners.try_into().ok()?;
        Some(scanner)
    }

    /// Waits for a scanner other than `last` that knows of the shared pages; returns its process.
    #[track_caller]
    fn shares(&self, last: Option<u32>) -> u32 {
        let mut pid = 0;
        wait_until("a scanner shares the equal pages", || {
            let scanner = self.scanner().filter(|scanner| Some(scanner.pid) != last);
            pid = scanner.as_ref().map_or(0, |scanner| scanner.pid);
            scanner.is_some_and(|scanner| scanner.saved == NONZERO)
        });
        pid
    }

    fn why(&self) -> String {
        Answer::of(&mut self.a().aquifer(&["why", "blue"])).stdout
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for name in ["one", "two"] {
            let _ = self.a().aquifer(&["region", "rm", name]).output();
        }
    }
}

#[test]
fn the_agent_scans_a_group_while_it_has_regions() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let mut programs = vec![scene.fill("one")];
    assert_eq!(scene.scanner(), None, "one region has none to share with");
    programs.push(scene.fill("two"));
    let first = scene.shares(None);
    let shown = scene.done(&["group", "show", "blue"]);
    assert_eq!(shown["scanner"]["pid"], first, "{shown}");
    assert_eq!(shown["scanner"]["by_agent"], true, "{shown}");
    let status = Answer::of(&mut scene.a().aquifer(&["status"])).stdout;
    assert!(status.contains(&format!("process {first} of the agent")), "{status}");
    let second = scene.a().aquifer(&[SCANNER, &["blue"]].concat()).output().unwrap();
    assert!(!second.status.success() && stderr(&second).contains("already"), "{second:?}");

    kill_process(process(Some(first)), Signal::KILL).unwrap();
    let next = scene.shares(Some(first));
    assert!(scene.why().contains("starts another scanner for group blue in 1s"), "{}", scene.why());
    scene.a().kill_agent();
    assert!(lives(Some(next)));
    scene.a().restart();
    wait_until("the next agent finds the scanner", || {
        scene.why().contains("of group blue, which an earlier agent started")
    });
    assert_eq!(scene.shares(None), next);

    scene.done(&["group", "set", "blue", "--scan", "50"]);
    let last = scene.shares(Some(next));
    assert!(scene.why().contains("its terms have changed"), "{}", scene.why());
    for program in &mut programs {
        program.does_in_time("check 1");
    }
    programs.clear();
    ["one", "two"].into_iter().for_each(|name| scene.remove(name));
    wait_until("the scanner has ended", || !lives(Some(last)) && scene.scanner().is_none());
    scene.done(&["group", "rm", "blue"]);
}

#[test]
fn an_operators_scanner_is_neither_doubled_nor_ended() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let mut command = scene.a().aquifer(&[&["--json"], SCANNER, &["blue"]].concat());
    let mut own: Daemon = Daemon::start(command.args(["--report", "1h"])).unwrap();
    own.report().unwrap();
    let programs = [scene.fill("one"), scene.fill("two")];
    assert_eq!(scene.shares(None), own.pid().as_raw_pid().cast_unsigned());
    assert!(scene.scanner().is_some_and(|scanner| !scanner.by_agent));
    wait_until("the agent finds the scanner", || {
        scene.why().contains("of group blue, which an operator started")
    });
    own.end(Signal::TERM).unwrap();
    let of_agent = scene.shares(Some(own.pid().as_raw_pid().cast_unsigned()));
    assert!(scene.scanner().is_some_and(|scanner| scanner.by_agent));

    // An agent that must not scan ends what its predecessor started.
    scene.a().kill_agent();
    scene.a().configure(|config| {
        config["groups"].as_table_mut().unwrap().insert("scan".to_owned(), false.into());
    });
    scene.a().restart();
    wait_until("the scanner has ended", || !lives(Some(of_agent)));
    assert!(own.ended_within(Duration::ZERO).is_some());
    drop(programs);
    ["one", "two"].into_iter().for_each(|name| scene.remove(name));
}

#[test]
fn a_scanner_without_agent_and_regions_ends_itself() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let programs = [scene.fill("one"), scene.fill("two")];
    let scanner = scene.shares(None);
    scene.a().kill_agent();
    drop(programs);
    ["one", "two"].into_iter().for_each(|name| scene.remove(name));
    wait_until("the scanner has ended", || !lives(Some(scanner)));
    scene.a().restart();
    assert_eq!(scene.scanner(), None);
}
