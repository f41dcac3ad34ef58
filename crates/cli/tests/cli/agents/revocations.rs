//! Tests of hosts that are shut out of their cluster. None of these tests swaps.

use std::fs;
use std::time::{Duration, Instant};

use aquifer_api::path;
use aquifer_api::status::Standing;
use aquifer_page::Bytes;
use aquifer_transport::tls;

use super::certificates::{Open, can_lend, knows, with_program};
use super::clusters::Outsider;
use super::framework::{Answer, Cluster, Host, Identity, Spec, lacks_rights, wait_until};

fn forget(on: &Host, words: &[&str]) -> Answer {
    let mut forget = on.aquifer(&[&["cluster", "forget"], words].concat());
    Answer::of(forget.arg("--config").arg(on.config()))
}

/// Returns whether a host refuses a revoked identity in the handshake. The server closes at once,
/// so now and then a reset overtakes its alert.
fn is_refused(shut_out: &Identity, by: &Host) -> bool {
    let error = shut_out.get(by, path::OFFER).map_err(|error| error.to_string()).unwrap_err();
    error.contains("CertificateRevoked")
}

fn keeps(name: &'static str) -> Spec {
    Spec::new(name).set("lend", "enabled", false)
}

#[test]
fn a_host_that_is_forgotten_is_shut_out_for_good() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(keeps("a"));
    cluster.join(Spec::new("b").memory(Bytes::mib(512)));
    cluster.join(keeps("c"));
    cluster.join(keeps("d"));
    let (a, b, c, d) = (&cluster["a"], &cluster["b"], &cluster["c"], &cluster["d"]);
    wait_until("c knows what b can lend", || can_lend(c, "b"));
    let program = with_program(&cluster, c);
    let mut open = Open::new(c, b);
    assert_eq!(open.ask(), Some(200));
    wait_until("a knows c and d", || knows(a, "c", Standing::Up) && knows(a, "d", Standing::Up));
    d.kill_agent();
    wait_until("a knows that d is down", || knows(a, "d", Standing::Down));

    forget(a, &["c"]).must_fail(1, &["c is up", "--force"]);
    forget(a, &["a", "--force"]).must_fail(1, &["a is up"]);
    let answer = forget(a, &["c", "--force"]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert!(answer.stdout.contains("known to b"), "{answer:?}");
    assert!(answer.stdout.contains("not yet known to d"), "{answer:?}");
    wait_until("the open connection ends", || open.ask().is_none());
    wait_until("b has its memory back, with no connection", || b.is_free());
    let shut_out = Identity::load(&c.tls());
    wait_until("a refuses c", || is_refused(&shut_out, a));
    wait_until("b refuses c", || is_refused(&shut_out, b));
    for host in [a, b] {
        wait_until("no host lists c", || {
            !host.status().peers.iter().any(|peer| peer.host.as_str() == "c")
        });
    }
    wait_until("c hears no gossip", || {
        c.status().peers.iter().all(|peer| peer.standing != Standing::Up)
    });

    // A host that was away, and one that starts again.
    b.kill_agent();
    b.restart();
    d.restart();
    wait_until("d refuses c", || {
        let error = shut_out.get(d, path::OFFER).err().map(|error| error.to_string());
        error.is_some_and(|error| error.contains("CertificateRevoked"))
    });
    wait_until("b refuses c", || is_refused(&shut_out, b));
    for (host, other) in [(a, "b"), (a, "d"), (b, "d"), (d, "b")] {
        wait_until("the others know each other", || knows(host, other, Standing::Up));
    }
    drop(program);

    // A new machine has the name, the memory of which nobody confuses with the former one's.
    c.kill_agent();
    let _ = Answer::of(&mut c.aquifer(&["region", "rm", "items"]));
    cluster.forget("c");
    // The former one knew the first token, which has ended.
    let outsider = Outsider::new(&cluster, "outsider");
    let refused = outsider.join(&cluster["a"], cluster.token(), "c");
    refused.must_fail(1, &["does not know this token"]);
    cluster.make_token();
    cluster.join(keeps("c"));
    let (b, c) = (&cluster["b"], &cluster["c"]);
    wait_until("b knows the new c", || knows(b, "c", Standing::Up));
    assert_eq!(Identity::load(&c.tls()).get(b, path::OFFER).unwrap()["host"], "b");
}

#[test]
fn a_borrower_closes_its_connections_to_a_revoked_lender() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(keeps("a"));
    cluster.join(keeps("b"));
    cluster.join(Spec::new("c").memory(Bytes::mib(512)));
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    wait_until("b knows what c can lend", || can_lend(b, "c"));
    let program = with_program(&cluster, b);
    wait_until("b is connected", || c.lent().connections > Some(0));
    wait_until("a knows c", || knows(a, "c", Standing::Up));
    assert_eq!(forget(a, &["c", "--force"]).code, Some(0));
    // The region's engine is a process of its own.
    wait_until("the engine has no connection to c", || c.lent().connections == Some(0));
    drop(program);
    let _ = Answer::of(&mut b.aquifer(&["region", "rm", "items"]));
}

#[test]
fn a_host_that_leaves_and_joins_at_once_is_a_member() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(keeps("a"));
    cluster.join(keeps("b"));
    cluster.join(keeps("c"));
    wait_until("b knows c", || knows(&cluster["b"], "c", Standing::Up));
    let kept = cluster.dir().join("kept");
    fs::create_dir(&kept).unwrap();
    for file in ["ca.pem", "host.pem", "host.key"] {
        fs::copy(cluster["c"].tls().join(file), kept.join(file)).unwrap();
    }
    let former = Identity::load(&kept);
    let mut leave = cluster["c"].aquifer(&["cluster", "leave", "--config"]);
    assert_eq!(Answer::of(leave.arg(cluster["c"].config())).code, Some(0));
    wait_until("the agent of c ends", || cluster["c"].ended().is_some());
    cluster.forget("c");
    cluster.join(keeps("c"));
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    // It begins with what the others know.
    let known = tls::Identity::load(&c.tls()).unwrap().revocations();
    assert!(known.until(&c.host_name()).is_some());
    wait_until("b knows the new c", || knows(b, "c", Standing::Up));
    let since = Instant::now();
    wait_until("some seconds have passed", || {
        assert_eq!(Identity::load(&c.tls()).get(b, path::OFFER).unwrap()["host"], "b");
        assert_eq!(Identity::load(&c.tls()).get(a, path::OFFER).unwrap()["host"], "a");
        since.elapsed() > Duration::from_secs(4)
    });
    for host in [a, b] {
        wait_until("the former c is refused", || is_refused(&former, host));
    }
}

#[test]
fn a_signer_from_an_older_copy_hears_of_revocations() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(keeps("a"));
    cluster.join(keeps("b"));
    cluster.join(keeps("c"));
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    wait_until("all know each other", || {
        knows(a, "c", Standing::Up) && knows(a, "b", Standing::Up) && knows(b, "c", Standing::Up)
    });
    let record = a.cluster().join("hosts/c.pem");
    let copy = fs::read(&record).unwrap();
    let former = Identity::load(&c.tls());
    assert_eq!(forget(a, &["c", "--force"]).code, Some(0));
    a.kill_agent();
    fs::write(&record, copy).unwrap();
    fs::remove_file(a.tls().join("revoked.json")).unwrap();
    fs::remove_file(a.cluster().join("gossip.latest.json")).unwrap();
    a.restart();
    wait_until("a knows that c is revoked", || {
        let known = tls::Identity::load(&a.tls()).unwrap().revocations();
        known.until(&c.host_name()).is_some()
    });
    wait_until("a refuses c", || is_refused(&former, a));
    wait_until("a hears gossip under the present key", || knows(a, "b", Standing::Up));
}
