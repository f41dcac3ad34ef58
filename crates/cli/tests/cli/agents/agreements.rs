//! Tests of the agreements of a cluster's groups: an operator makes one on a host, and the others
//! get it by themselves.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use aquifer_api::agreement::{GivenAgreement, Known};
use aquifer_api::path;
use serde_json::Value;

use super::framework::{Answer, Cluster, Host, Identity, lacks_rights, wait_until};

fn three() -> Cluster {
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    cluster.join("c");
    cluster
}

fn run(host: &Host, words: &[&str]) -> Answer {
    Answer::of(&mut host.aquifer(words))
}

#[track_caller]
fn done(host: &Host, words: &[&str]) -> Value {
    run(host, &[words, &["--json"]].concat()).json()
}

fn file(host: &Host, name: &str) -> PathBuf {
    host.groups().join(format!("{name}.toml"))
}

fn text(host: &Host, name: &str) -> String {
    fs::read_to_string(file(host, name)).unwrap_or_default()
}

/// Makes a region of the group on a host, and removes it.
#[track_caller]
fn join_with_region(host: &Host, group: &str) {
    let made = ["region", "create", "one", "--size", "8M", "--cache", "16M"];
    let joined = [&made[..], &["--emulate-link", "1us", "--group", group]].concat();
    let answer = run(host, &joined);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert!(!answer.stderr.contains("missing"), "{answer:?}");
    done(host, &["region", "rm", "one"]);
}

#[test]
fn an_agreement_made_on_one_host_is_on_all() {
    if lacks_rights() {
        return;
    }
    let mut cluster = three();
    cluster["c"].kill_agent();
    done(&cluster["a"], &["group", "create", "blue", "--max-memory", "1G"]);
    // At once, without any copy by hand.
    join_with_region(&cluster["b"], "blue");
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    assert_eq!(text(a, "blue"), text(b, "blue"));
    let mode = fs::metadata(file(b, "blue")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let fingerprint = |host: &Host| done(host, &["group", "show", "blue"])["key_id"].clone();
    assert_eq!(fingerprint(a), fingerprint(b));
    assert!(!file(c, "blue").exists());

    // A host that was down gets it later, with what changed since.
    done(b, &["group", "set", "blue", "--max-memory", "2G"]);
    wait_until("a has the new terms", || text(a, "blue") == text(b, "blue"));
    c.restart();
    wait_until("c has the agreement", || text(c, "blue") == text(b, "blue"));
    join_with_region(c, "blue");
    // A host that joins gets it, too.
    cluster.join("d");
    let (a, d) = (&cluster["a"], &cluster["d"]);
    wait_until("d has the agreement", || text(d, "blue") == text(a, "blue"));
}

#[test]
fn a_removed_agreement_stays_removed() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    done(a, &["group", "create", "blue"]);
    wait_until("all have it", || [b, c].iter().all(|host| file(host, "blue").exists()));
    c.kill_agent();
    done(b, &["group", "rm", "blue"]);
    wait_until("a has it no more", || !file(a, "blue").exists());
    // The host that was away loses it, and does not bring it back.
    c.restart();
    wait_until("c has it no more", || !file(c, "blue").exists());
    done(c, &["group", "create", "blue"]);
    wait_until("all have the new one", || {
        [a, b].iter().all(|host| text(host, "blue") == text(c, "blue"))
    });
}

#[test]
fn a_host_that_left_gets_no_agreement() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, c) = (&cluster["a"], &cluster["c"]);
    done(a, &["group", "create", "blue"]);
    wait_until("c has it", || file(c, "blue").exists());
    let identity = Identity::load(&c.tls());
    let path = path::agreement(&"blue".parse().unwrap());
    let get = |path: &str| {
        aquifer_hosts::block_on(identity.agent(a).get::<Value>(path)).map_err(|e| e.to_string())
    };
    let given: GivenAgreement = serde_json::from_value(get(&path).unwrap()).unwrap();
    assert_eq!(given.edition.version, 1);
    let known: Known = serde_json::from_value(get(path::AGREEMENTS).unwrap()).unwrap();
    assert_eq!(known.agreements.len(), 1);
    let listed = serde_json::to_string(&known).unwrap();
    let key = text(a, "blue");
    let key = key.lines().find_map(|line| line.strip_prefix("key = \"")).unwrap();
    assert!(!listed.contains(&key[..16]), "{listed}");

    let left = run(c, &["cluster", "leave", "--config", c.config().to_str().unwrap()]);
    assert_eq!(left.code, Some(0), "{left:?}");
    for path in [path.as_str(), path::AGREEMENTS] {
        wait_until("a refuses c", || get(path).is_err());
        let error = get(path).unwrap_err();
        assert!(error.contains("is not a peer") || error.contains("left"), "{error}");
    }
}
