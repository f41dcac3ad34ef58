//! Tests of regions whose pages have two copies, at two lenders that die, lie and come back.

use std::fs;
use std::path::Path;

use aquifer_store::tmpfs::stores;
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::framework::{Program, Setting, kill};
use crate::common::{Export, serve, stderr, stdout, wait_until};

/// A lender whose pages outlive its process.
struct Lender {
    store: TempDir,
    address: String,
    export: Export,
}

impl Lender {
    fn start(setting: &Setting, name: &str) -> Self {
        let store = tempfile::tempdir_in(stores().unwrap()).unwrap();
        let address = format!("unix:{}", setting.dir.path().join(name).display());
        let export = serve_at(setting, &address, store.path());
        Self { store, address, export }
    }

    fn dies(&mut self) {
        self.export.end(Signal::KILL).unwrap();
    }

    fn is_back(&mut self, setting: &Setting) {
        self.export = serve_at(setting, &self.address, self.store.path());
    }
}

fn serve_at(setting: &Setting, address: &str, store: &Path) -> Export {
    serve(setting.dir.path(), &["128M", "--nbd", address, "--dir", store.to_str().unwrap()])
}

/// A region of 32 MiB with an eighth of it local, and a program that maps it.
struct Mirrored {
    setting: Setting,
    lenders: [Lender; 2],
    program: Program,
}

impl Mirrored {
    fn start(protection: &str) -> Option<Self> {
        let setting = Setting::new()?;
        let lenders = ["one", "two"].map(|name| Lender::start(&setting, name));
        let second = lenders[1].export.uri();
        let more = ["--protection", protection, "--lender", second, "--fault-timeout", "20s"];
        let region = setting.create_over(&lenders[0].export, "safe", &more);
        let mut program = setting.start(&region);
        program.does("write 1");
        Some(Self { setting, lenders, program })
    }

    fn copy(&self) -> Value {
        self.setting.show("safe")["volume"]["leases"][0]["copy"].clone()
    }

    #[track_caller]
    fn is_whole(&self) {
        wait_until("both copies are whole", || {
            let copy = self.copy();
            copy["answer"] == serde_json::json!([true, true])
                && copy["lacks"] == 0
                && copy["first_lacks"] == 0
                && copy["ring"].get("used").is_none_or(|used| *used == 0)
        });
    }

    fn next_engine(&self) {
        kill(&self.setting.show("safe")["pid"]);
        wait_until("another engine serves the region", || {
            self.setting.aquifer(&["region", "show", "safe"]).status.success()
        });
    }

    fn end(self) {
        let Self { setting, program, .. } = self;
        drop(program);
        setting.remove("safe");
    }
}

#[test]
fn a_program_goes_on_when_a_lender_or_an_engine_dies() {
    ["mirror", "opportunistic"].into_iter().for_each(goes_on_after_deaths);
}

fn goes_on_after_deaths(protection: &str) {
    let Some(mut mirrored) = Mirrored::start(protection) else { return };
    let lags = protection == "opportunistic";
    assert_eq!(mirrored.copy()["ring"].is_object(), lags, "{}", mirrored.copy());
    let mut seed = 1;
    for dead in [0, 1, 0] {
        mirrored.is_whole();
        mirrored.lenders[dead].dies();
        mirrored.program.does_in_time(&format!("check {seed}"));
        seed += 1;
        mirrored.program.does_in_time(&format!("write {seed}"));
        // What each copy lacks outlives the engine.
        mirrored.next_engine();
        mirrored.program.does_in_time(&format!("check {seed}"));
        let shown = stdout(&mirrored.setting.aquifer(&["region", "show", "safe"]));
        assert!(shown.contains(if dead == 0 { "alone has" } else { "lacks" }), "{shown}");
        // It comes back with the pages that it had when it died.
        mirrored.lenders[dead].is_back(&mirrored.setting);
    }
    mirrored.is_whole();
    mirrored.program.does_in_time(&format!("check {seed}"));
    let shown = stdout(&mirrored.setting.aquifer(&["region", "show", "safe"]));
    assert!(shown.contains("complete"), "{shown}");
    mirrored.end();
}

#[test]
fn a_program_goes_on_when_a_lender_is_silent_or_lies() {
    ["mirror", "opportunistic"].into_iter().for_each(goes_on_after_lies);
}

fn goes_on_after_lies(protection: &str) {
    let Some(mut mirrored) = Mirrored::start(protection) else { return };
    for silent in [0, 1] {
        mirrored.is_whole();
        let lender = mirrored.lenders[silent].export.daemon.pid();
        kill_process(lender, Signal::STOP).unwrap();
        mirrored.program.does_in_time(&format!("check {}", silent + 1));
        mirrored.program.does_in_time(&format!("write {}", silent + 2));
        kill_process(lender, Signal::CONT).unwrap();
    }
    mirrored.is_whole();
    mirrored.setting.done(&["region", "persist", "safe"]);
    let all = fs::read_dir(mirrored.lenders[0].store.path()).unwrap();
    let pages = all.map(|entry| entry.unwrap().path());
    let pages = pages.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = fs::read(&pages).unwrap();
    bytes.rotate_left(4096);
    fs::write(&pages, bytes).unwrap();
    mirrored.program.does_in_time("check 3");
    let shown = mirrored.setting.show("safe");
    let events = shown["volume"]["events"].as_array().unwrap();
    let found = |event: &&Value| event["event"] == "copy_behind";
    let lies = events
        .iter()
        .filter(found)
        .filter(|event| event["why"].as_str().is_some_and(|why| why.contains("it returned")));
    assert!(lies.count() > 0, "{events:?}");
    mirrored.is_whole();
    mirrored.program.does_in_time("write 4");
    mirrored.program.does_in_time("check 4");
    mirrored.end();
}

#[test]
fn lenders_of_two_copies_come_in_pairs() {
    let Some(setting) = Setting::new() else { return };
    let uri = setting.lender.uri();
    let words = ["region", "create", "r", "--size", "32M", "--cache", "8M", "--protection"];
    let mirror = [&words[..], &["mirror"]].concat();
    for (more, why) in [
        (&[][..], "--lender"),
        (&["--lender", uri], "no second lender"),
        (&["--lender", uri, "--lender", uri], "copy of its own pages"),
    ] {
        let refused = setting.aquifer(&[&mirror[..], more].concat());
        assert!(!refused.status.success());
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
    }
}
