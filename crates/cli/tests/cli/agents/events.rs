//! Tests of events: a line in the log and a row of the status, on the host that the event concerns.

use aquifer_api::status::{EventKind, LeaseHealth};
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::framework::{Cluster, Host, Spec, lacks_rights, wait_for, wait_until};

#[track_caller]
fn wait_for_event(host: &Host, kind: EventKind) -> String {
    let event = wait_for(&format!("the host reports the event {kind}"), || {
        host.status().history.events.into_iter().find(|event| event.kind == kind)
    });
    let log = host.log_text();
    assert!(log.contains(&event.what), "the log lacks the event: {event:?}\n{log}");
    event.what
}

#[test]
fn a_lender_that_goes_and_comes_back_is_two_events() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "20s");
    let cluster = Cluster::that_swaps([a, Spec::new("b")]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(128));
    let mut load = a.load(Bytes::mib(48));
    load.filled();
    load.order("rewrite");
    b.kill_agent();
    let lost = wait_for_event(a, EventKind::LenderLost);
    assert!(lost.contains("b does not answer"), "{lost}");
    b.restart();
    wait_for_event(a, EventKind::LenderBack);
    load.filled();
    load.verify();
    drop(load);
    a.give_back();
}

#[test]
fn a_lease_that_its_lender_has_lost_is_told_to_the_borrower() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "1s");
    // The borrower renews its leases at an eighth of its own grace.
    let cluster = Cluster::that_swaps([a.set("lend", "grace", "40s"), Spec::new("b")]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(64));
    let mut load = a.load(Bytes::mib(40));
    load.filled();
    let lease = b.lent().lease;
    drop(load);
    b.kill_agent();
    std::fs::remove_dir_all(b.store()).unwrap();
    b.restart();
    let lost = wait_for_event(a, EventKind::LeaseLost);
    assert!(lost.contains(&lease.to_string()) && lost.contains('b'), "{lost}");
    let held = a.held_of("b").unwrap();
    // The lender says so, or the volume finds out.
    assert!(held.health == LeaseHealth::Lost && held.state.starts_with("lost"), "{held:?}");
    let events = a.status().history.events;
    assert_eq!(
        events.iter().filter(|event| event.kind == EventKind::LeaseLost).count(),
        1,
        "{events:?}"
    );
    a.give_back();
}

#[test]
fn a_program_that_the_kernel_kills_is_an_event() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new([Spec::new("a").memory(Bytes::mib(32))]);
    let a = &cluster["a"];
    // The cgroup may not swap while nothing is borrowed.
    let load = a.load(Bytes::mib(64));
    let what = wait_for_event(a, EventKind::OomKill);
    assert!(what.contains("killed 1 program"), "{what}");
    assert!(!load.killed().success());
}

#[test]
fn a_borrower_silent_past_its_grace_is_an_event_at_the_lender() {
    if lacks_rights() {
        return;
    }
    let b = Spec::new("b").set("lend", "grace", "3s").set("memory", "period", "50ms");
    let cluster = Cluster::that_swaps([Spec::new("a"), b]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(64));
    let pid = a.volume().pid;
    a.kill_agent();
    kill_process(super::framework::process(pid), Signal::KILL).unwrap();
    let what = wait_for_event(b, EventKind::BorrowerLost);
    assert!(what.contains("no sign of a"), "{what}");
    a.restart();
    wait_until("a is free", || a.is_free());
}

#[test]
fn a_vm_that_ends_is_an_event_of_its_host() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new([Spec::new("a")]);
    let a = &cluster["a"];
    let started = a
        .aquifer(&["--json", "vm", "start", "web", "--memory", "32M", "--accel", "tcg"])
        .output()
        .unwrap();
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let vm: serde_json::Value = serde_json::from_slice(&started.stdout).unwrap();
    let qemu = vm["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32)).unwrap();
    kill_process(qemu, Signal::KILL).unwrap();
    assert!(wait_for_event(a, EventKind::VmEnded).contains("signal 9 killed QEMU"));
}
