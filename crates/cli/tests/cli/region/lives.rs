//! Tests of programs that fork, stop, end and start again, and of engines that end in the meantime.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::Value;

use super::framework::{Setting, kill, kill_processes};
use crate::common::{serve, stderr, stdout, wait_until};

fn process(answer: &str) -> Pid {
    Pid::from_raw(answer.rsplit(' ').next().unwrap().parse().unwrap()).unwrap()
}

/// Waits until another engine serves the region after `before`.
fn another_serves(setting: &Setting, name: &str, before: &Value) {
    wait_until("another engine serves the region", || {
        let shown = setting.aquifer(&["--json", "region", "show", name]);
        serde_json::from_slice::<Value>(&shown.stdout).is_ok_and(|status| status["pid"] != *before)
    });
}

/// A process that is killed at the end of the test.
struct Ending(Pid);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn a_child_that_closes_the_region_takes_nothing_from_its_parent() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("family", &[]);
    let mut program = setting.lives(&region, &[]);
    for seed in 1..4 {
        program.does_in_time(&format!("close {seed} 40"));
        program.does_in_time(&format!("check {seed}"));
    }
    assert_eq!(setting.show("family")["programs"].as_array().unwrap().len(), 1);
}

#[test]
fn a_program_is_gone_when_it_ends_though_its_child_lives() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("orphan", &[]);
    let mut program = setting.lives(&region, &[]);
    program.does_in_time("write 1");
    program.order("stay");
    let _child = Ending(process(&program.answers_in_time()));
    program.signal(Signal::KILL);
    drop(program);
    wait_until("no program maps the region", || {
        setting.show("orphan")["programs"].as_array().unwrap().is_empty()
    });
    let mut next = setting.lives(&region, &[]);
    next.does_in_time("check 1");
    next.does_in_time("write 2");
    next.does_in_time("check 2");
}

#[test]
fn a_region_stays_while_its_program_waits_for_an_engine() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("wanted", &[]);
    let mut program = setting.lives(&region, &[]);
    program.does_in_time("write 1");
    for _ in 0..5 {
        kill(&setting.show("wanted")["pid"]);
        let refused = setting.aquifer(&["region", "rm", "wanted"]);
        assert!(stderr(&refused).contains("in use by lives"), "{}", stderr(&refused));
    }
    kill_processes(&setting, "wanted");
    let refused = setting.aquifer(&["region", "rm", "wanted"]);
    assert!(stderr(&refused).contains("in use by lives"), "{}", stderr(&refused));
    setting.done(&["region", "recover", "wanted"]);
    program.does_in_time("check 1");
}

#[test]
fn a_stopped_program_keeps_its_pages_and_others_are_served() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("stopped", &[]);
    let mut stopped = setting.lives(&region, &[]);
    let mut other = setting.lives(&region, &[]);
    stopped.does_in_time("write 1");
    stopped.signal(Signal::STOP);
    other.does_in_time("check 1");
    let began = Instant::now();
    let refused = setting.aquifer(&["region", "resize", "stopped", "--cache", "1M"]);
    assert!(stderr(&refused).contains("resume a stopped program"), "{}", stderr(&refused));
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
    assert_eq!(setting.show("stopped")["programs"].as_array().unwrap().len(), 2);
    // The next engine knows neither program; one of them connects again.
    kill(&setting.show("stopped")["pid"]);
    other.does_in_time("check 1");
    stopped.signal(Signal::CONT);
    stopped.does_in_time("check 1");
    stopped.does_in_time("write 2");
    other.does_in_time("check 2");
    setting.done(&["region", "resize", "stopped", "--cache", "1M"]);
    other.does_in_time("check 2");
}

#[test]
fn a_neighbour_of_a_stopped_program_is_told_so_and_served() {
    let Some(setting) = Setting::new() else { return };
    let socket = format!("unix:{}", setting.dir.path().join("second").display());
    let second = serve(setting.dir.path(), &["64M", "--nbd", &socket]);
    let one = setting.create("one", &[]);
    let words =
        ["region", "create", "two", "--size", "32M", "--cache", "8M", "--lender", second.uri()];
    let created = setting.done(&words);
    let two = Path::new(created["file"].as_str().unwrap());
    setting.done(&["region", "set-limit", "--cache", "8M"]);
    let mut stopped = setting.lives(&one, &[]);
    stopped.does_in_time("write 1");
    stopped.signal(Signal::STOP);
    let mut other = setting.lives(two, &[]);
    other.does_in_time("write 2");
    other.does_in_time("check 2");
    let shown = setting.show("one");
    assert_eq!(shown["programs"].as_array().unwrap().len(), 1, "{shown}");
    stopped.signal(Signal::CONT);
    stopped.does_in_time("check 1");
    drop((stopped, other));
    setting.done(&["region", "set-limit", "--cache", "none"]);
    // The region must go before its lender.
    setting.remove("two");
}

#[test]
fn removing_pages_behind_the_engine_fails_or_leaves_zeroes() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("holes", &[]);
    let mut program = setting.lives(&region, &[]);
    program.does_in_time("write 1");
    // Resident pages, and remote pages.
    for order in ["remove 0 100", "remove 8000 192"] {
        program.order(order);
        assert_eq!(program.answers_in_time(), format!("remove {}", libc::EINVAL));
    }
    program.does_in_time("check 1");
    // munlockall(2) lifts the refusal. The program then removes resident pages, the last that were
    // touched.
    program.does_in_time("unlock 8100 92");
    program.does_in_time("zero 8100 92");
    program.does_in_time("see 1 8000");
}

#[test]
fn a_program_that_locks_its_memory_reads_remote_pages() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("locked", &[]);
    setting.lives(&region, &[]).does_in_time("write 1");
    let mut program = setting.lives(&region, &["lock"]);
    program.does_in_time("check 1");
    program.does_in_time("write 2");
    program.does_in_time("check 2");
}

#[test]
fn an_engine_out_of_descriptors_serves_waiting_clients_later() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("full", &[]);
    let engine = setting.show("full")["pid"].as_i64().unwrap();
    let engine = Pid::from_raw(engine as i32);
    // This process is the engine's parent and has the same limit.
    let before = getrlimit(Resource::Nofile);
    prlimit(engine, Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
    // A waiting accept(2) has its descriptor already; the next call finds none.
    drop(
        aquifer_region_client::Connection::to(&setting.dir.path().join("regions/.full/programs"))
            .unwrap(),
    );
    setting.aquifer(&["region", "show", "full"]);
    let log = setting.dir.path().join("regions/.full/log");
    wait_until("the engine logs that it cannot accept", || {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        said.contains("cannot accept clients") && said.contains("cannot accept programs")
    });
    let mut asking = crate::common::aquifer(setting.dir.path());
    asking.args(["--json", "region", "show", "full"]).stdout(Stdio::piped());
    let mut asking = asking.spawn().unwrap();
    let mapping = std::thread::scope(|scope| {
        let mapping = scope.spawn(|| setting.lives(&region, &[]));
        assert!(asking.try_wait().unwrap().is_none());
        prlimit(engine, Resource::Nofile, before).unwrap();
        mapping.join().unwrap()
    });
    let shown: Value = serde_json::from_str(&stdout(&asking.wait_with_output().unwrap())).unwrap();
    assert_eq!(shown["pid"].as_i64().unwrap() as i32, engine.unwrap().as_raw_nonzero().get());
    let mut program = mapping;
    program.does_in_time("write 1");
    program.does_in_time("check 1");
}

#[test]
fn an_engine_without_its_lender_serves_its_local_pages() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("alone", &[]);
    let mut program = setting.lives(&region, &[]);
    program.does_in_time("write 1");
    program.does_in_time("some 2 500");
    kill_process(setting.lender.daemon.pid(), Signal::STOP).unwrap();
    let before = setting.show("alone")["pid"].clone();
    kill(&before);
    another_serves(&setting, "alone", &before);
    // This program has a page table of its own, about which the engine knows nothing yet.
    let mut other = setting.lives(&region, &[]);
    other.does_in_time("see 2 500");
    program.order("check 1");
    wait_until("'region show' says that faults wait", || {
        stdout(&setting.aquifer(&["region", "show", "alone"])).contains("WAITING")
    });
    kill_process(setting.lender.daemon.pid(), Signal::CONT).unwrap();
    // All pages except those written since.
    assert_eq!(program.answers_in_time(), "check 500");
    program.does_in_time("see 2 500");
}

#[test]
fn an_engine_that_panics_in_any_thread_is_followed_by_the_next() {
    let Some(setting) = Setting::new() else { return };
    let order = setting.dir.path().join("panic");
    let words = [
        "region",
        "create",
        "panic",
        "--size",
        "32M",
        "--cache",
        "8M",
        "--lender",
        setting.lender.uri(),
    ];
    let mut create = crate::common::aquifer(setting.dir.path());
    let created =
        create.env("AQUIFER_TEST_PANIC", &order).arg("--json").args(words).output().unwrap();
    let created: Value = serde_json::from_str(&stdout(&created)).unwrap();
    let mut program = setting.lives(Path::new(created["file"].as_str().unwrap()), &[]);
    program.does_in_time("write 1");
    let before = setting.show("panic")["pid"].clone();
    let order = order.with_extension(before.to_string());
    std::fs::write(&order, "").unwrap();
    program.does_in_time("check 1");
    another_serves(&setting, "panic", &before);
    program.does_in_time("check 1");
    let log = std::fs::read_to_string(setting.dir.path().join("regions/.panic/log")).unwrap();
    assert!(log.contains("thread 'panics'") && log.contains("starting another"), "{log}");
}

#[test]
fn regions_that_come_and_go_at_once_are_on_one_file_system() {
    let Some(setting) = Setting::new() else { return };
    let another = setting.another_lender();
    std::thread::scope(|scope| {
        for (name, lender) in [("a", &setting.lender), ("b", &another)] {
            let setting = &setting;
            scope.spawn(move || {
                for _ in 0..6 {
                    setting.create_over(lender, name, &[]);
                    setting.done(&["region", "rm", name]);
                }
            });
        }
    });
    wait_until("the tmpfs is gone", || setting.mounts() == 0);
    let left = std::fs::read_dir(setting.dir.path().join("regions")).map_or(0, Iterator::count);
    assert_eq!(left, 0);
}
