//! Tests of regions whose pages have a copy on the host's disk, and whose lender dies.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use aquifer_store::tmpfs::{mount, stores};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::framework::{Program, Setting, kill};
use crate::common::{Export, serve, stdout, wait_until};

/// A region of 32 MiB with an eighth of it local, a program that maps it, and its lender, whose
/// pages outlive the lender's process.
struct OnDisk {
    setting: Setting,
    store: TempDir,
    lender: Export,
    program: Program,
}

impl OnDisk {
    /// Starts with the copies in this directory of the setting.
    fn start(setting: Setting, directory: &str) -> Self {
        let store = tempfile::tempdir_in(stores().unwrap()).unwrap();
        let lender = serve_at(&setting, &store);
        let directory = setting.dir.path().join(directory);
        let more = ["--protection", "disk", "--fault-timeout", "20s", "--copy-dir"];
        let more = [&more[..], &[directory.to_str().unwrap()]].concat();
        let region = setting.create_over(&lender, "safe", &more);
        let mut program = setting.start(&region);
        program.does("write 1");
        Self { setting, store, lender, program }
    }

    fn copy(&self) -> Value {
        self.setting.show("safe")["volume"]["leases"][0]["disk"].clone()
    }

    fn shown(&self) -> String {
        stdout(&self.setting.aquifer(&["region", "show", "safe"]))
    }

    #[track_caller]
    fn is_whole(&self) {
        wait_until("the disk and the lender have all pages", || {
            let copy = self.copy();
            copy["lender_answers"] == true
                && ["lacks", "lender_lacks", "in_ring"].iter().all(|part| copy[*part] == 0)
        });
    }

    fn lender_dies(&mut self) {
        self.lender.end(Signal::KILL).unwrap();
    }

    fn lender_is_back(&mut self) {
        self.lender = serve_at(&self.setting, &self.store);
    }

    fn next_engine(&self) {
        kill(&self.setting.show("safe")["pid"]);
        wait_until("another engine serves the region", || {
            self.setting.aquifer(&["region", "show", "safe"]).status.success()
        });
    }

    fn end(self) -> Setting {
        let Self { setting, program, .. } = self;
        drop(program);
        setting.remove("safe");
        setting
    }
}

fn serve_at(setting: &Setting, store: &TempDir) -> Export {
    let address = format!("unix:{}", setting.dir.path().join("one").display());
    let store = store.path().to_str().unwrap();
    serve(setting.dir.path(), &["128M", "--nbd", &address, "--dir", store])
}

fn files(setting: &Setting, directory: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(setting.dir.path().join(directory)).unwrap();
    files.map(|file| file.unwrap().path()).collect()
}

#[test]
fn a_program_goes_on_from_the_disk_when_its_lender_dies() {
    let Some(setting) = Setting::new() else { return };
    let mut on_disk = OnDisk::start(setting, "copies");
    on_disk.is_whole();
    on_disk.lender_dies();
    on_disk.program.does_in_time("check 1");
    on_disk.program.does_in_time("write 2");
    let shown = on_disk.shown();
    assert!(shown.contains("does not answer") && shown.contains("alone has"), "{shown}");
    // What only the disk has outlives the engine.
    on_disk.next_engine();
    on_disk.program.does_in_time("check 2");
    on_disk.program.does_in_time("write 3");
    on_disk.program.does_in_time("check 3");
    // It comes back with the pages that it had when it died.
    on_disk.lender_is_back();
    on_disk.is_whole();
    on_disk.program.does_in_time("check 3");
    let shown = on_disk.shown();
    assert!(shown.contains("on disk") && !shown.contains("alone has"), "{shown}");
    assert_eq!(files(&on_disk.setting, "copies").len(), 1);
    let setting = on_disk.end();
    assert!(files(&setting, "copies").is_empty());
}

#[test]
fn an_engine_that_is_killed_leaves_no_old_page_on_the_disk() {
    let Some(setting) = Setting::new() else { return };
    let mut on_disk = OnDisk::start(setting, "copies");
    for seed in 2..5 {
        // Some pages are on their way to the disk.
        on_disk.program.does_in_time(&format!("write {seed}"));
        on_disk.next_engine();
        on_disk.is_whole();
        on_disk.lender_dies();
        on_disk.program.does_in_time(&format!("check {seed}"));
        on_disk.lender_is_back();
        on_disk.is_whole();
    }
    on_disk.end();
}

/// A small tmpfs, unmounted when this drops.
struct SmallDisk(PathBuf);

impl Drop for SmallDisk {
    fn drop(&mut self) {
        _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn a_full_disk_stops_no_program_and_gets_its_pages_later() {
    let Some(setting) = Setting::new() else { return };
    let disk = SmallDisk(setting.dir.path().join("small"));
    fs::create_dir(&disk.0).unwrap();
    mount("aquifer-test", &disk.0, "4M", false).unwrap();
    let mut on_disk = OnDisk::start(setting, "small");
    on_disk.program.does_in_time("write 2");
    on_disk.program.does_in_time("check 2");
    wait_until("the disk is full", || on_disk.copy()["paused"].is_string());
    let shown = on_disk.shown();
    assert!(shown.contains("PAUSED") && shown.contains("No space left"), "{shown}");
    on_disk.program.does_in_time("write 3");
    on_disk.program.does_in_time("check 3");
    let events = on_disk.setting.show("safe")["volume"]["events"].clone();
    let is_told =
        |name: &str| events.as_array().unwrap().iter().any(|event| event["event"] == name);
    assert!(is_told("disk_copies_paused"), "{events}");
    let mut grow = Command::new("mount");
    grow.args(["-o", "remount,size=128M"]).arg(&disk.0);
    assert!(grow.status().unwrap().success());
    on_disk.is_whole();
    assert!(on_disk.copy()["paused"].is_null());
    on_disk.lender_dies();
    on_disk.program.does_in_time("check 3");
    let setting = on_disk.end();
    drop(disk);
    drop(setting);
}
