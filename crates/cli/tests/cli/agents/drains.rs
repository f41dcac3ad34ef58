//! Tests of lenders that stop as planned: no page stored there is lost.

use aquifer_api::order::Draining;
use aquifer_api::status::EventKind;
use aquifer_page::Bytes;
use rustix::process::Signal;

use super::framework::{
    Answer, Cluster, Host, Load, Spec, address, init, lacks_rights, wait_until,
};

/// Starts a borrower `a` with pages at `b`, its only lender so far, and `others` that begin to
/// lend.
fn start_swapping(others: &[&'static str]) -> (Cluster, Load) {
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "20s");
    let aside = |name: &&'static str| Spec::new(name).set("lend", "enabled", false);
    let hosts = [a, Spec::new("b")].into_iter().chain(others.iter().map(aside));
    let cluster = Cluster::that_swaps(hosts);
    cluster["a"].borrow(Bytes::mib(128));
    let mut load = cluster["a"].load(Bytes::mib(64));
    load.filled();
    assert!(cluster["b"].stored() > Bytes::mib(8), "{}", cluster["b"].stored());
    for name in others {
        let host = &cluster[*name];
        host.signal_agent(Signal::TERM);
        set_lending(host, true);
        host.restart();
    }
    (cluster, load)
}

fn set_lending(host: &Host, lends: bool) {
    host.configure(|config| {
        config["lend"].as_table_mut().unwrap().insert("enabled".to_owned(), lends.into());
    });
}

fn drain(host: &Host, words: &[&str]) -> Answer {
    Answer::of(&mut host.aquifer(&[&["host", "drain", "--json"], words].concat()))
}

fn last_report(answer: &Answer) -> Draining {
    assert_eq!(answer.code, Some(0), "{answer:?}");
    serde_json::from_str(answer.stdout.lines().last().unwrap()).unwrap()
}

#[track_caller]
fn assert_b_holds_nothing(cluster: &Cluster) {
    let (a, b) = (&cluster["a"], &cluster["b"]);
    assert!(b.lease_files().is_empty());
    assert!(a.held_of("b").is_none(), "{:?}", a.volume());
}

#[track_caller]
fn give_back(cluster: &Cluster, mut load: Load) {
    load.free();
    cluster["a"].give_back();
    wait_until("a is free", || cluster["a"].is_free());
}

#[test]
fn a_drained_lender_can_go_while_its_borrower_rewrites() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping(&["c"]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    load.rewrite_during(|| {
        let end = last_report(&drain(b, &[]));
        assert!(end.on && end.left.is_empty(), "{end:?}");
        assert_b_holds_nothing(&cluster);
    });
    assert!(a.held_of("c").is_some_and(|held| held.placed > Bytes::ZERO), "{:?}", a.volume());
    let events = b.status().history.events;
    assert!(events.iter().any(|event| event.kind == EventKind::Drain), "{events:?}");

    // `b` lends nothing until it is told to.
    assert_eq!(b.status().memory.spare, Bytes::ZERO);
    let ended: Draining = Answer::of(&mut b.aquifer(&["host", "undrain", "--json"])).json();
    assert!(!ended.on);
    wait_until("b lends again", || b.status().memory.spare > Bytes::ZERO);
    give_back(&cluster, load);
}

#[test]
fn an_interrupted_lender_drains_before_it_ends() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping(&[]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    load.rewrite_during(|| {
        assert!(b.signal_agent(Signal::INT).success());
        assert_b_holds_nothing(&cluster);
    });
    let log = b.log_text();
    assert!(log.contains("still lent: ") && log.contains("all leases are back"), "{log}");
    let volume = a.volume();
    assert!(volume.spilled > Bytes::ZERO, "{volume:?}");
    wait_until("a reports the spill as an event", || {
        a.status().history.events.iter().any(|event| event.kind == EventKind::Spill)
    });
    give_back(&cluster, load);
}

#[test]
fn a_lender_that_is_not_to_lend_any_more_drains_when_it_starts() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping(&[]);
    let b = &cluster["b"];
    load.rewrite_during(|| {
        b.signal_agent(Signal::TERM);
        set_lending(b, false);
        b.restart();
        wait_until("b has all its memory back", || b.is_free());
        assert_b_holds_nothing(&cluster);
    });
    let log = b.log_text();
    assert!(log.contains("wait for the next agent for 20s"), "{log}");
    give_back(&cluster, load);
}

#[test]
fn a_second_interrupt_ends_at_once_and_names_the_losses() {
    if lacks_rights() {
        return;
    }
    let (cluster, load) = start_swapping(&[]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    // No pages move while a's agent is away.
    a.kill_agent();
    let answer = drain(b, &["--timeout", "500ms"]);
    answer.must_fail(1, &["still lent", "a does not answer", "host undrain"]);
    b.signal(Signal::INT).unwrap();
    wait_until("b says that it waits for a", || b.log_text().contains("a does not answer"));
    let end = b.signal_agent(Signal::INT);
    assert_eq!(end.code(), Some(1));
    let log = b.log_text();
    assert!(log.contains("a loses ") && log.contains("then fail"), "{log}");
    // The next agent has all of the pages.
    set_lending(b, true);
    b.restart();
    a.restart();
    give_back(&cluster, load);
}

#[test]
fn hosts_that_are_no_longer_peers_give_back_their_leases() {
    if lacks_rights() {
        return;
    }
    for forgetful in ["a", "b"] {
        let (cluster, mut load) = start_swapping(&[]);
        let (b, host) = (&cluster["b"], &cluster[forgetful]);
        load.rewrite_during(|| {
            host.signal_agent(Signal::TERM);
            host.configure(|config| {
                config.remove("peer");
            });
            host.restart();
            wait_until("b has all its memory back", || b.is_free());
            assert_b_holds_nothing(&cluster);
        });
        let told = match forgetful {
            "a" => "b is no peer of this host any more, but has lent this host lease",
            _ => "a is no peer of this host any more, but holds lease",
        };
        let log = host.log_text();
        assert!(log.contains(told), "{log}");
        give_back(&cluster, load);
    }
}

#[test]
fn a_drain_that_is_asked_for_twice_is_one() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a"]);
    let a = &cluster["a"];
    let text = Answer::of(&mut a.aquifer(&["host", "drain"]));
    assert!(text.stdout.contains("this host lends nothing"), "{text:?}");
    assert!(last_report(&drain(a, &[])).on);
    let events: Vec<_> =
        a.status().history.events.into_iter().filter(|e| e.kind == EventKind::Drain).collect();
    assert!(events.len() <= 2, "{events:?}");
    let end = Answer::of(&mut a.aquifer(&["host", "undrain"]));
    assert!(end.code == Some(0) && end.stdout.contains("lends and takes VMs again"), "{end:?}");
}

#[test]
fn an_agent_with_a_foreign_certificate_does_not_start() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a"]);
    let a = &cluster["a"];
    let elsewhere = cluster.dir().join("elsewhere");
    init(&elsewhere, [("a", address())]);
    std::fs::copy(elsewhere.join("a/tls/ca.pem"), a.tls().join("ca.pem")).unwrap();
    let answer = a.refusal();
    answer.must_fail(1, &["host.pem", "no peer would trust it", "aquifer cluster join"]);
}
