//! Tests of killed engines and processes, and of lenders that are away.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::framework::{Setting, kill, kill_processes};
use crate::common::{serve, stderr, stdout, wait_until};

#[test]
fn engines_that_are_killed_under_load_lose_nothing() {
    let Some(setting) = Setting::new() else { return };
    for (number, policy) in ["clock", "sieve", "random"].into_iter().enumerate() {
        let region = setting.create(policy, &["--policy", policy]);
        let mut program = setting.start(&region);
        for round in 0..4 {
            program.order(&format!("write {}", 10 * number + round));
            for _ in 0..3 {
                let pid = setting.show(policy)["pid"].clone();
                sleep(Duration::from_millis(60));
                kill(&pid);
                wait_until("another engine serves the region", || {
                    let shown = setting.aquifer(&["--json", "region", "show", policy]);
                    serde_json::from_slice::<Value>(&shown.stdout)
                        .is_ok_and(|status| status["pid"] != pid)
                });
            }
            assert_eq!(program.answer(), "write 0");
            program.does(&format!("check {}", 10 * number + round));
        }
        drop(program);
        setting.remove(policy);
    }
}

#[test]
fn leftovers_of_killed_processes_are_served_or_removed() {
    let Some(setting) = Setting::new() else { return };
    let mut program = setting.start(&setting.create("left", &[]));
    program.does("write 1");
    program.order("check 1");
    kill_processes(&setting, "left");
    assert!(stdout(&setting.aquifer(&["region", "list"])).contains("no engine serves it"));
    let refused = setting.aquifer(&["region", "show", "left"]);
    assert!(stderr(&refused).contains("'aquifer region recover left'"), "{}", stderr(&refused));

    setting.done(&["region", "recover", "left"]);
    assert_eq!(program.answer(), "check 0");
    let refused = setting.aquifer(&["region", "recover", "left"]);
    assert!(stderr(&refused).contains("is served already"), "{}", stderr(&refused));
    program.does("check 1");

    kill_processes(&setting, "left");
    drop(program);
    setting.done(&["region", "rm", "left"]);
    wait_until("the tmpfs is gone", || setting.mounts() == 0);
    let refused = setting.aquifer(&["region", "recover", "left"]);
    assert!(stderr(&refused).contains("there is no region 'left'"), "{}", stderr(&refused));
}

#[test]
fn a_program_waits_for_a_lender_that_is_away() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("away", &[]);
    let mut program = setting.start(&region);
    program.does("write 5");
    kill_process(setting.lender.daemon.pid(), Signal::STOP).unwrap();
    program.order("check 5");
    wait_until("'region show' says that faults wait", || {
        stdout(&setting.aquifer(&["region", "show", "away"])).contains("WAITING")
    });
    assert!(stdout(&setting.aquifer(&["region", "list"])).contains("WAIT for a lender"));
    kill_process(setting.lender.daemon.pid(), Signal::CONT).unwrap();
    assert_eq!(program.answer(), "check 0");
}

#[test]
fn a_program_that_is_not_to_wait_is_told_so() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("short", &["--fault-timeout", "2s", "--prefetch", "off"]);
    let mut program = setting.start(&region);
    program.does("write 6");
    setting.done(&["region", "persist", "short"]);
    // After `persist`, with reads only, the cache has clean pages.
    program.does("check 6");
    program.does("check 6");
    // Lenders do not store pages of zeroes.
    assert!(setting.show("short")["usage"]["dirty"].as_u64().unwrap() < 256 << 10);
    kill_process(setting.lender.daemon.pid(), Signal::STOP).unwrap();
    program.order("check 6");
    let end = program.child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&end), Some(7), "{end}");
    kill_process(setting.lender.daemon.pid(), Signal::CONT).unwrap();
    assert!(setting.show("short")["counts"]["given_up"].as_u64().unwrap() > 0);
    // The next program finds the pages unchanged.
    setting.start(&region).does("check 6");
}

#[test]
fn pages_of_a_living_lender_come_while_another_is_dead() {
    let Some(setting) = Setting::new() else { return };
    let mut lenders = ["one", "two"].map(|name| {
        let socket = format!("unix:{}", setting.dir.path().join(name).display());
        serve(setting.dir.path(), &["64M", "--nbd", &socket])
    });
    let words =
        ["region", "create", "half", "--size", "128M", "--cache", "4M", "--prefetch", "off"];
    let [one, two] = lenders.each_ref().map(|lender| lender.uri());
    let more = ["--fault-timeout", "1s", "--lender", one, "--lender", two];
    let created = setting.done(&[&words[..], &more].concat());
    let mut program = setting.start(Path::new(created["file"].as_str().unwrap()));
    // The region has two extents, each at another lender.
    program.does("write 1 0 2048");
    let first = setting.show("half")["volume"]["leases"][0]["used_extents"] == 1;
    program.does("write 2 16384 2048");
    // The cache is full of dirty pages that only the first extent's lender could take.
    program.does("write 3 0 2048");
    lenders[usize::from(!first)].end(Signal::KILL).unwrap();
    for _ in 0..3 {
        program.does_in_time("check 2 16384 2048");
        program.does_in_time("write 2 16384 2048");
    }
    drop(program);
    setting.remove("half");
}
