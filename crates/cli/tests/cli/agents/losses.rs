//! Tests of hosts that do not come back.

use std::time::{Duration, Instant};

use aquifer_api::status::LeaseHealth;
use aquifer_page::Bytes;
use rustix::process::{Signal, kill_process};

use super::framework::{Cluster, STEP_TIMEOUT, Spec, lacks_rights, process, wait_until};

#[test]
fn a_lost_lender_is_named_and_its_borrowers_fail_soon() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "2s");
    let cluster = Cluster::that_swaps([
        a,
        Spec::new("b").memory(Bytes::mib(96)),
        Spec::new("c").memory(Bytes::mib(96)),
    ]);
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    a.borrow(Bytes::mib(128));
    let mut load = a.load(Bytes::mib(108));
    load.filled();
    let (lost, volume) = (c.lent().lease, a.volume());

    load.order("rewrite");
    c.kill_agent();
    let killed = Instant::now();
    let end = load.killed();
    assert!(killed.elapsed() < STEP_TIMEOUT, "the load waited for {:?}", killed.elapsed());
    assert!(!end.success());
    let error = a.volume().last_error.unwrap_or_default();
    assert!(error.contains("lender c") && error.contains(&lost.to_string()), "{error:?}");
    let held = a.held_of("c").unwrap();
    assert_eq!(held.health, LeaseHealth::Unreachable);
    assert!(held.state.starts_with("unreachable for"), "{held:?}");
    assert_eq!(a.held_of("b").unwrap().state, "ok");

    a.give_back();
    wait_until("a and b are free", || a.is_free() && b.is_free());
    a.leaves_nothing(&volume);
    // If `c` comes back after all, it learns that its lease is over.
    c.restart();
    wait_until("c is free", || c.is_free());
}

#[test]
fn a_lost_borrowers_lease_is_freed_after_its_grace() {
    if lacks_rights() {
        return;
    }
    let grace = Duration::from_secs(3);
    let b = Spec::new("b").set("lend", "grace", "3s");
    let cluster = Cluster::that_swaps([Spec::new("a").memory(Bytes::mib(32)), b]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(64));
    let mut load = a.load(Bytes::mib(48));
    load.filled();
    let volume = a.volume();

    // The agent alone is no loss: its volume is a sign of life, for however long.
    a.kill_agent();
    let alone = Instant::now();
    wait_until("twice the grace is over", || {
        assert_eq!(b.status().loans.lent.len(), 1, "b freed the lease after {:?}", alone.elapsed());
        alone.elapsed() > 2 * grace
    });
    load.verify();

    kill_process(process(volume.pid), Signal::KILL).unwrap();
    let gone = Instant::now();
    wait_until("b frees the lease", || b.is_free());
    // A connection counts as a sign of life for an eighth of the grace after the last look at it.
    assert!(gone.elapsed() > grace * 3 / 4, "b freed the lease after {:?}", gone.elapsed());
    assert!(gone.elapsed() < grace + STEP_TIMEOUT, "b freed the lease after {:?}", gone.elapsed());
    let told =
        b.status().history.decisions.iter().any(|decision| decision.what.contains("no sign of a"));
    assert!(told, "{:?}", b.status().history.decisions);

    drop(load);
    a.restart();
    assert!(a.is_free() && a.status().loans.borrowed.is_empty());
    a.leaves_nothing(&volume);
}

#[test]
fn a_volume_that_is_killed_is_cleared_away_by_its_agent() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps([Spec::new("a").memory(Bytes::mib(32)), Spec::new("b")]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(64));
    let mut load = a.load(Bytes::mib(48));
    load.filled();
    let volume = a.volume();
    kill_process(process(volume.pid), Signal::KILL).unwrap();
    load.order_if_alive("verify");
    assert!(!load.killed().success(), "the load must not succeed without its lost pages");
    wait_until("a and b are free", || a.is_free() && b.is_free());
    a.leaves_nothing(&volume);
    let told = a
        .status()
        .history
        .decisions
        .iter()
        .any(|decision| decision.what.contains("its process has died"));
    assert!(told, "{:?}", a.status().history.decisions);

    a.borrow(Bytes::mib(64));
    let mut load = a.load(Bytes::mib(48));
    load.filled();
    load.verify();
}
