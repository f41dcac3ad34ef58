//! Tests of the agreements of a cluster's groups: an operator makes one on a host, and the others
//! get it by themselves.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

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

/// Returns three hosts that have the group blue, which an operator made on a.
fn with_blue() -> Cluster {
    let cluster = three();
    done(&cluster["a"], &["group", "create", "blue"]);
    wait_until("all have it", || {
        ["b", "c"].iter().all(|name| file(&cluster[*name], "blue").exists())
    });
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
    let cluster = with_blue();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    c.kill_agent();
    let agreed = text(a, "blue");
    assert_eq!(make_region(a, "blue").code, Some(0));
    done(b, &["group", "rm", "blue"]);
    // A host with regions of the group keeps the agreement for them, and for no others.
    wait_until("a knows of it", || run(a, &["why", "blue"]).stdout.contains("is removed"));
    assert!(file(a, "blue").exists());
    let more = ["region", "create", "two", "--size", "8M", "--cache", "16M"];
    let more = run(a, &[&more[..], &["--emulate-link", "1us", "--group", "blue"]].concat());
    more.must_fail(1, &["group 'blue' was removed"]);
    let set = run(a, &["group", "set", "blue", "--max-members", "3"]);
    set.must_fail(1, &["group 'blue' was removed"]);
    let shown = run(a, &["group", "show", "blue"]).stdout;
    assert!(shown.contains("removed on host b; stays until"), "{shown}");
    done(a, &["region", "rm", "one"]);
    wait_until("a has it no more", || !file(a, "blue").exists());
    make_region(a, "blue").must_fail(1, &["group 'blue' was removed"]);
    // The key is not lost.
    let why = run(a, &["why", "blue"]).stdout;
    assert!(why.contains(".toml.removed") && why.contains("is removed"), "{why}");
    let kept = fs::read_dir(a.groups()).unwrap().map(|entry| entry.unwrap().path());
    let kept: Vec<_> =
        kept.filter(|path| path.to_str().unwrap().ends_with(".toml.removed")).collect();
    assert_eq!(fs::read_to_string(&kept[0]).unwrap(), agreed);
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
    let cluster = with_blue();
    let (a, c) = (&cluster["a"], &cluster["c"]);
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
        assert!(error.contains("CertificateRevoked"), "{error}");
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
    let cluster = with_blue();
    let (a, c) = (&cluster["a"], &cluster["c"]);
    let identity = Identity::load(&c.tls());
    let get = |path: &str| aquifer_hosts::block_on(identity.agent(a).get::<Value>(path)).unwrap();
    let (mut known, mut given) =
        (get(path::AGREEMENTS), get(&path::agreement(&"blue".parse().unwrap())));
    c.kill_agent();
    // A newer version of blue with terms that are not those of its hash, and a group with the body
    // of another one.
    let line = &mut known["agreements"][0];
    line["edition"] = serde_json::json!({ "version": 7, "hash": "00000000000000bb" });
    given["edition"] = line["edition"].clone();
    let mut red = line.clone();
    red["group"] = "red".into();
    red["key_id"] = "00000000000000aa".into();
    known["agreements"].as_array_mut().unwrap().push(red);
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
    let set = ["group", "set", "blue", "--max-members", "9"];
    run(b, &set).must_fail(1, &["lacks its version 7", "--force"]);
    done(b, &[&set[..], &["--force"]].concat());
    wait_until("a has the change", || text(a, "blue") == text(b, "blue"));
    assert_eq!(listed(a, "blue")[0]["version"], 8);
    // A group that no host has does not keep its name.
    run(b, &["group", "create", "red"]).must_fail(1, &["has a group 'red'", "--key"]);
    run(b, &["group", "rm", "red", "--key", "00000000000000bb"]).must_fail(1, &["knows no such"]);
    done(b, &["group", "rm", "red", "--key", "00000000000000aa"]);
    done(b, &["group", "create", "red"]);
    wait_until("a has the real one", || {
        text(a, "red") == text(b, "red") && !text(a, "red").is_empty()
    });
}

#[test]
fn an_excluded_host_gives_no_key_and_changes_no_terms() {
    if lacks_rights() {
        return;
    }
    let cluster = with_blue();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    done(a, &["group", "set", "blue", "--host", "a"]);
    let version = |host: &Host| listed(host, "blue")[0]["version"].clone();
    wait_until("b knows of it", || version(b) == 2);
    let identity = Identity::load(&c.tls());
    let path = path::agreement(&"blue".parse().unwrap());
    let error = aquifer_hosts::block_on(identity.agent(b).get::<Value>(&path)).unwrap_err();
    assert!(error.to_string().contains("has no group 'blue'"), "{error}");
    let set = ["group", "set", "blue", "--max-members", "9"];
    run(b, &set).must_fail(1, &["lacks its version 2, made on host a", "--force"]);

    // An edit of the file wins no more, also after the agent has forgotten what it heard.
    let edited = text(b, "blue").replace("lends = false", "lends = true");
    fs::write(file(b, "blue"), &edited).unwrap();
    wait_until("b warns", || run(b, &["why", "blue"]).stdout.contains("--force"));
    b.kill_agent();
    b.restart();
    done(a, &["group", "create", "green"]);
    wait_until("b hears a again", || file(b, "green").exists());
    assert_eq!((version(a), version(b), version(c)), (2.into(), 2.into(), 2.into()));
    assert!(text(a, "blue").contains("lends = false") && text(b, "blue") == edited);
    done(b, &[&set[..], &["--host", "any", "--force"]].concat());
    wait_until("all have that of b", || {
        [a, c].iter().all(|host| text(host, "blue") == text(b, "blue"))
    });
}

#[test]
fn no_host_weakens_the_encryption_of_another() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    done(a, &["group", "create", "blue", "--encryption", "random"]);
    wait_until("b has it", || file(b, "blue").exists());
    let weaker = run(a, &["group", "set", "blue", "--encryption", "deterministic"]);
    weaker.must_fail(1, &["deterministic is weaker than random", "create another group"]);
    let edited = text(b, "blue").replace("\"random\"", "\"off\"");
    fs::write(file(b, "blue"), edited).unwrap();
    wait_until("a refuses it", || {
        run(a, &["why", "blue"]).stdout.contains("weakens --encryption from random to off")
    });
    assert!(text(a, "blue").contains("encryption = \"random\""));
    done(a, &["group", "set", "blue", "--max-members", "9", "--force"]);
    wait_until("b has that of a", || text(a, "blue") == text(b, "blue"));
}

#[test]
fn a_limit_of_caches_applies_on_all_hosts_at_once() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    done(a, &["group", "create", "blue"]);
    join_with_region(b, "blue");
    assert_eq!(make_region(b, "blue").code, Some(0));
    let limit = |host| done(host, &["region", "show-limits"])["groups"]["blue"].clone();
    assert_eq!(limit(b), Value::Null);
    done(a, &["group", "set", "blue", "--max-cache", "8M"]);
    assert_ne!(limit(a), Value::Null);
    wait_until("b has the limit", || limit(b) == limit(a));
    done(b, &["region", "rm", "one"]);
}

#[test]
fn a_slow_host_does_not_hold_up_the_others() {
    if lacks_rights() {
        return;
    }
    let cluster = with_blue();
    let (a, c) = (&cluster["a"], &cluster["c"]);
    let identity = Identity::load(&c.tls());
    let known = aquifer_hosts::block_on(identity.agent(a).get::<Value>(path::AGREEMENTS)).unwrap();
    c.kill_agent();
    let line = |number: u64| {
        let mut line = known["agreements"][0].clone();
        line["group"] = format!("slow-{number}").into();
        line
    };
    let known = serde_json::json!({ "agreements": (0..50).map(line).collect::<Vec<_>>() });
    let [lists, agreements] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let counts = (lists.clone(), agreements.clone());
    liar::lie(
        c,
        a,
        Box::new(move |path| {
            if path == path::AGREEMENTS {
                counts.0.fetch_add(1, Ordering::Relaxed);
                return Some(known.to_string());
            }
            if path.starts_with(path::AGREEMENTS) {
                counts.1.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_secs(60));
            }
            None
        }),
    );
    wait_until("the others ask twice", || agreements.load(Ordering::Relaxed) >= 3);
    let (agreements, lists) = (agreements.load(Ordering::Relaxed), lists.load(Ordering::Relaxed));
    assert!(agreements <= lists, "{agreements} agreements, {lists} lists");
    done(a, &["group", "create", "green"]);
    wait_until("b has the new group", || file(&cluster["b"], "green").exists());
}
