//! Tests of the agreements of a cluster's groups: an operator makes one on a host, and the others
//! get it by themselves.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use aquifer_api::agreement::{GivenAgreement, Known};
use aquifer_api::path;
use serde_json::Value;

use super::framework::{Answer, Cluster, Host, Identity, lacks_rights, liar, wait_until};
use super::vm_moves::lacks_qemu;

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

/// Tries to make a region of the group on a host.
fn make_region(host: &Host, group: &str) -> Answer {
    let made = ["region", "create", "one", "--size", "8M", "--cache", "16M"];
    run(host, &[&made[..], &["--emulate-link", "1us", "--group", group]].concat())
}

/// Makes a region of the group on a host, and removes it. A busy machine may need more than once.
#[track_caller]
fn join_with_region(host: &Host, group: &str) {
    wait_until("a region joins the group", || {
        let answer = make_region(host, group);
        assert_eq!(answer.code, Some(0), "{answer:?}");
        done(host, &["region", "rm", "one"]);
        !answer.stderr.contains("is missing")
    });
}

/// Returns the line of a group in the list of a host.
fn listed(host: &Host, group: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_value(done(host, &["group", "list"])).unwrap();
    all.into_iter().filter(|line| line["name"] == group).collect()
}

#[test]
fn an_agreement_made_on_one_host_is_on_all() {
    if lacks_rights() {
        return;
    }
    let mut cluster = three();
    cluster["c"].kill_agent();
    done(&cluster["a"], &["group", "create", "blue", "--max-memory", "1G"]);
    // At once, without a copy by hand.
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

/// A VM with a definition; its drop removes it.
struct Vm<'a>(&'a Host);

impl Vm<'_> {
    fn state(&self) -> Value {
        let all = done(self.0, &["vm", "list", "--all"]);
        let vm = all.as_array().unwrap().iter().find(|vm| vm["name"] == "web");
        vm.map_or(Value::Null, |vm| vm["state"].clone())
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        let _ = self.0.aquifer(&["vm", "rm", "web", "--force"]).output();
    }
}

#[test]
fn a_defined_vm_starts_where_no_agreement_was_copied() {
    if lacks_qemu() {
        return;
    }
    let mut cluster = Cluster::created("a");
    done(&cluster["a"], &["group", "create", "blue", "--host", "b"]);
    cluster.join("b");
    let b = &cluster["b"];
    let vm = Vm(b);
    let words = ["vm", "create", "web", "--group", "blue", "--memory", "32M", "--cache", "32M"];
    done(b, &[&words[..], &["--emulate-link", "1us", "--accel", "tcg"]].concat());
    wait_until("the VM runs", || vm.state() == "running");
    assert_eq!(text(b, "blue"), text(&cluster["a"], "blue"));
    assert_eq!(done(b, &["group", "show", "blue"])["regions"][0], "web");
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
    assert_eq!(make_region(a, "blue").code, Some(0));
    done(b, &["group", "rm", "blue"]);
    // A host with regions of the group keeps the agreement for them, and for no others.
    wait_until("a knows of it", || run(a, &["why", "blue"]).stdout.contains("is removed"));
    assert!(file(a, "blue").exists());
    let more = ["region", "create", "two", "--size", "8M", "--cache", "16M"];
    let more = run(a, &[&more[..], &["--emulate-link", "1us", "--group", "blue"]].concat());
    more.must_fail(1, &["group 'blue' was removed"]);
    done(a, &["region", "rm", "one"]);
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

#[test]
fn two_keys_with_one_name_stay_until_an_operator_chooses() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    b.kill_agent();
    done(b, &["group", "create", "blue"]);
    done(a, &["group", "create", "blue"]);
    let before = [a, b].map(|host| text(host, "blue"));
    b.restart();
    let conflict = |host: &Host| {
        let lines = listed(host, "blue");
        lines.iter().find_map(|line| line["conflict"].as_str().map(str::to_owned))
    };
    for host in [a, b] {
        wait_until("the host shows the conflict", || conflict(host).is_some());
        let conflict = conflict(host).unwrap();
        for word in ["hosts ", "a (key ", "b (key ", "aquifer group rm blue"] {
            assert!(conflict.contains(word), "{conflict}");
        }
        assert_eq!(listed(host, "blue").len(), 2);
        assert!(run(host, &["group", "show", "blue"]).stdout.contains("CONFLICT"));
    }
    // A host without either gets neither.
    cluster.join("c");
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    wait_until("c knows both", || listed(c, "blue").len() == 2);
    make_region(c, "blue").must_fail(1, &["different groups named 'blue'", "group rm blue"]);
    run(c, &["group", "create", "blue"]).must_fail(1, &["different groups named 'blue'"]);
    assert_eq!([a, b].map(|host| text(host, "blue")), before);
    assert!(!file(c, "blue").exists());

    done(b, &["group", "rm", "blue"]);
    wait_until("all have that of a", || [b, c].iter().all(|host| text(host, "blue") == before[0]));
    wait_until("no host shows a conflict", || {
        [a, b, c].iter().all(|host| conflict(host).is_none())
    });
}

#[test]
fn a_host_that_the_agreement_does_not_name_gets_no_key() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    done(a, &["group", "create", "blue", "--host", "a", "--host", "b*"]);
    wait_until("b has it", || file(b, "blue").exists());
    wait_until("c knows of it", || listed(c, "blue").len() == 1);
    let line = &listed(c, "blue")[0];
    assert_eq!((&line["made_on"], &line["version"]), (&"a".into(), &1.into()), "{line}");
    make_region(c, "blue").must_fail(1, &["it was made on host a", "--host"]);
    run(c, &["group", "create", "blue"]).must_fail(1, &["the cluster has a group 'blue'"]);
    let identity = Identity::load(&c.tls());
    let path = path::agreement(&"blue".parse().unwrap());
    let error = aquifer_hosts::block_on(identity.agent(b).get::<Value>(&path)).unwrap_err();
    assert!(error.to_string().contains("host c may not have"), "{error}");
    assert!(!file(c, "blue").exists());

    done(b, &["group", "set", "blue", "--host", "any"]);
    wait_until("c has it", || !text(c, "blue").is_empty() && text(c, "blue") == text(a, "blue"));
}

#[test]
fn a_file_that_an_operator_copies_is_told_to_all() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    done(a, &["group", "create", "blue", "--groups", cluster.dir().to_str().unwrap()]);
    fs::create_dir_all(b.groups()).unwrap();
    fs::copy(cluster.dir().join("blue.toml"), file(b, "blue")).unwrap();
    wait_until("all have it", || [a, c].iter().all(|host| file(host, "blue").exists()));
    // An edit is a new version.
    let edited = text(c, "blue").replace("lends = false", "lends = true");
    assert_ne!(edited, text(c, "blue"));
    fs::write(file(c, "blue"), edited).unwrap();
    wait_until("all have the edit", || {
        [a, b].iter().all(|host| text(host, "blue").contains("lends = true"))
    });
    assert_eq!(listed(a, "blue")[0]["made_on"], "c");
}

#[test]
fn a_lie_changes_no_file_and_hinders_no_other_host() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, c) = (&cluster["a"], &cluster["c"]);
    done(a, &["group", "create", "blue"]);
    wait_until("c has it", || file(c, "blue").exists());
    let identity = Identity::load(&c.tls());
    let get = |path: &str| aquifer_hosts::block_on(identity.agent(a).get::<Value>(path)).unwrap();
    let (mut known, mut given) =
        (get(path::AGREEMENTS), get(&path::agreement(&"blue".parse().unwrap())));
    c.kill_agent();
    // A newer version of blue with terms that are not those of its hash, and a group with the body
    // of another one.
    let line = &mut known["agreements"][0];
    line["edition"]["version"] = 7.into();
    let mut red = line.clone();
    red["group"] = "red".into();
    red["key_id"] = "00000000000000aa".into();
    known["agreements"].as_array_mut().unwrap().push(red);
    given["edition"]["version"] = 7.into();
    let agreement = given["agreement"].as_str().unwrap();
    given["agreement"] = agreement.replace("lends = false", "lends = true").into();
    let (known, given) = (known.to_string(), given.to_string());
    liar::lie(
        c,
        a,
        Box::new(move |path| match path {
            path::AGREEMENTS => Some(known.clone()),
            path => path.starts_with(path::AGREEMENTS).then(|| given.clone()),
        }),
    );
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let before = text(a, "blue");
    for host in [a, b] {
        wait_until("the host refuses the lie", || {
            host.log_text().contains("host c sent an agreement of group 'blue'")
        });
    }
    let shown = run(a, &["group", "show", "blue"]).stdout;
    assert!(shown.contains("this host has another one"), "{shown}");
    // Truth still gets around, and an operator's change ends the lie.
    done(a, &["group", "create", "green"]);
    wait_until("b has the new group", || file(b, "green").exists());
    for host in [a, b] {
        assert_eq!(text(host, "blue"), before);
        assert!(!file(host, "red").exists());
    }
    done(b, &["group", "set", "blue", "--max-members", "9"]);
    wait_until("a has the change", || text(a, "blue") == text(b, "blue"));
    assert_eq!(listed(a, "blue")[0]["version"], 8);
}
