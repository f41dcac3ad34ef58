//! Tests of hosts with a wrong name, a wrong address or a wrong certificate: each gets a clear
//! error.

use aquifer_api::client::CallError;
use aquifer_api::path;
use aquifer_api::status::{EventKind, Peer};
use rustix::process::Signal;

use super::framework::{
    Answer, Cluster, Host, Identity, Spec, address, init, lacks_rights, wait_until,
};

fn peer(host: &Host, name: &str) -> Peer {
    host.status().peers.into_iter().find(|peer| peer.host.as_str() == name).unwrap()
}

#[test]
fn peers_are_called_before_anything_is_wanted_of_them() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a", "b", "dead"]);
    let a = &cluster["a"];
    cluster["dead"].kill_agent();
    wait_until("a hears from b", || peer(a, "b").spare.is_some());
    let b = peer(a, "b");
    assert!(
        b.heard_s.is_some_and(|age| age < 60.0) && b.spare_s.is_some() && b.error.is_none(),
        "{b:?}"
    );
    let text = Answer::of(&mut a.aquifer(&["status"])).stdout;
    assert!(text.contains("HEARD") && text.contains("s ago"), "{text}");
}

#[test]
fn only_peers_learn_how_much_a_host_can_lend() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["b"]);
    let b = &cluster["b"];
    let other = Identity::load(&cluster.admit("z"));
    let error = other.get(b, path::OFFER).unwrap_err();
    assert!(matches!(error, CallError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("z is not a peer of b"), "{error}");
}

#[test]
fn a_refusal_is_heard_as_one_and_the_next_lender_is_asked() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a", "b"]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    b.signal_agent(Signal::TERM);
    b.configure(|config| {
        config.remove("peer");
    });
    b.restart();
    let answer = Answer::of(&mut a.aquifer(&["host", "borrow", "--size", "64M"]));
    answer.must_fail(1, &["b refuses", "a is not a peer of b", "add a [[peer]] named a"]);
    assert!(peer(a, "b").refused, "{:?}", peer(a, "b"));
}

#[test]
fn two_authorities_are_named_as_the_cause() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a", "b"]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let elsewhere = cluster.dir().join("elsewhere");
    init(&elsewhere, [("b", address())]);
    for file in ["ca.pem", "host.pem", "host.key"] {
        std::fs::copy(elsewhere.join("b/tls").join(file), b.tls().join(file)).unwrap();
    }
    a.restart();
    b.restart();
    let answer = Answer::of(&mut a.aquifer(&["host", "borrow", "--size", "64M"]));
    answer.must_fail(1, &["do not trust each other's certificates", "this host does not trust"]);
    assert!(!answer.stderr.contains("extents"), "{answer:?}");
}

#[test]
fn a_second_host_of_the_same_name_hears_that_the_name_is_taken() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new([Spec::new("a"), Spec::new("b")]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    // A second `a`, elsewhere, which `b` does not know.
    let second = Cluster::admitted([Spec::new("a")]);
    let second = &second["a"];
    for file in ["ca.pem", "host.pem", "host.key"] {
        std::fs::copy(a.tls().join(file), second.tls().join(file)).unwrap();
    }
    let at = b.api().to_string();
    second.configure(|config| {
        let peer = toml::Table::from_iter([
            ("name".to_owned(), "b".into()),
            ("address".to_owned(), at.clone().into()),
        ]);
        config.insert("peer".to_owned(), vec![toml::Value::Table(peer)].into());
    });
    second.restart();
    wait_until("the second host reports that its name is taken", || {
        second.status().history.events.iter().any(|event| event.kind == EventKind::NameTaken)
    });
    let answer = Answer::of(&mut second.aquifer(&["host", "borrow", "--size", "64M"]));
    answer.must_fail(1, &["the name a is taken", &a.api().to_string()]);
    assert!(a.status().history.events.is_empty(), "the first host must report no event");
    assert!(b.status().loans.lent.is_empty());
}
