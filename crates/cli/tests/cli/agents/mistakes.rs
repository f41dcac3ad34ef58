//! Tests of wrong requests and of absent agents: each gives a clear error, soon.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use aquifer_api::status::Role;
use aquifer_hosts::daemon::AGENT;
use aquifer_page::Bytes;
use toml::{Table, Value};

use super::framework::{Answer, Cluster, Spec, address, init, lacks_rights, wait_until};

#[test]
fn a_wrong_configuration_is_refused_and_its_fault_named() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a", "b"]);
    let a = &cluster["a"];
    let path = a.config();
    let right = std::fs::read_to_string(&path).unwrap();
    for (section, key, value, named) in [
        ("memory", "uper", Value::from(0.9), "unknown field `uper`"),
        (
            "memory",
            "upper",
            Value::from(0.5),
            "lower = 0.6 and upper = 0.5 must be 0 < lower < upper < 1",
        ),
        ("memory", "lower", Value::from(-0.1), "lower = -0.1"),
        ("memory", "period", Value::from("often"), "'often' is not a time"),
        ("memory", "period", Value::from(1), "period"),
        ("borrow", "request", Value::from("12 parsecs"), "'12 parsecs' is not a size"),
        ("borrow", "request", Value::from("1M"), "at least one extent, 64MiB"),
        ("borrow", "max", Value::from("64M"), "max = 64MiB is less than a single request = 128MiB"),
        ("borrow", "backend", Value::from("floppy"), "floppy"),
        ("borrow", "io_timeout", Value::from("1ms"), "at least 100ms"),
        ("lend", "reserved", Value::from("-4G"), "-4G"),
        ("borow", "max", Value::from("64M"), "unknown field `borow`"),
    ] {
        a.configure(|config| {
            let section = config.entry(section).or_insert_with(|| Table::new().into());
            section.as_table_mut().unwrap().insert(key.to_owned(), value.clone());
        });
        let answer = a.refusal();
        answer.must_fail(1, &[named, path.to_str().unwrap()]);
        std::fs::write(&path, &right).unwrap();
    }
    for (text, named) in [
        (
            format!("{right}\n[[peer]]\nname = 'a'\naddress = '127.0.0.1:7070'\n"),
            "this host itself",
        ),
        (format!("{right}\n[[peer]]\nname = 'z'\naddress = 'no port'\n"), "must be HOST:PORT"),
        ("host = ".to_owned(), "line 1"),
        (String::new(), "missing field `host`"),
        ("host = 'a b'".to_owned(), "'a b' cannot be a host name"),
    ] {
        std::fs::write(&path, &text).unwrap();
        a.refusal().must_fail(1, &[named, path.to_str().unwrap()]);
    }
    std::fs::remove_file(&path).unwrap();
    a.refusal().must_fail(1, &["No such file", path.to_str().unwrap(), "aquifer cluster join"]);
}

#[test]
fn a_missing_or_foreign_certificate_is_named() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a", "b"]);
    let a = &cluster["a"];
    let use_tls = |dir: &std::path::Path| {
        a.configure(|config| {
            config.insert("tls".to_owned(), dir.to_str().unwrap().into());
        });
        a.refusal()
    };
    use_tls(&cluster["b"].tls()).must_fail(1, &["certificate of 'b'", "configuration is for 'a'"]);
    use_tls(&cluster.dir().join("nowhere"))
        .must_fail(1, &["nowhere/host.pem", "aquifer cluster join"]);

    let (mixed, elsewhere) = (cluster.dir().join("mixed"), cluster.dir().join("elsewhere"));
    init(&elsewhere, [("a", address())]);
    std::fs::create_dir(&mixed).unwrap();
    for file in ["ca.pem", "host.pem", "host.key"] {
        std::fs::copy(a.tls().join(file), mixed.join(file)).unwrap();
    }
    std::fs::copy(elsewhere.join("a/tls/host.key"), mixed.join("host.key")).unwrap();
    use_tls(&mixed).must_fail(1, &["mixed/host.pem", "the key"]);
    std::fs::write(mixed.join("host.pem"), "hello").unwrap();
    use_tls(&mixed).must_fail(1, &["mixed/host.pem"]);
}

#[test]
fn a_port_socket_or_store_in_use_is_named() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a", "b"]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    b.signal_agent(rustix::process::Signal::TERM);
    for port in [b.api(), b.pages()] {
        let _taken = TcpListener::bind(port).unwrap();
        b.refusal().must_fail(1, &[&port.to_string(), "in use"]);
    }
    {
        // Another program listens on a socket in the place of the agent's.
        let _taken = UnixListener::bind(b.socket()).unwrap();
        b.refusal().must_fail(1, &[b.socket().to_str().unwrap(), "another agent answers"]);
    }
    // Two agents on the same pages would destroy both stores.
    b.configure(|config| {
        config.insert("store".to_owned(), a.store().to_str().unwrap().into());
    });
    b.refusal().must_fail(1, &[a.store().to_str().unwrap(), &a.status().agent.pid.to_string()]);
}

#[test]
fn a_cgroup_or_a_store_that_cannot_be_used_is_named() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a"]);
    let a = &cluster["a"];
    let set_cgroup = |path: &str| {
        a.configure(|config| {
            config["memory"].as_table_mut().unwrap().insert("cgroup".to_owned(), path.into());
        });
    };
    set_cgroup("/sys/fs/cgroup/memory/no-such-group");
    a.refusal().must_fail(1, &["/sys/fs/cgroup/memory/no-such-group", "does not exist"]);
    set_cgroup("/proc");
    a.refusal().must_fail(1, &["/proc", "no memory controller"]);
    a.configure(|config| {
        config.insert("store".to_owned(), "/sys/kernel".into());
    });
    a.refusal().must_fail(1, &["/sys/kernel", "tmpfs"]);
}

#[test]
fn a_senseless_command_line_is_misuse() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a"]);
    for (words, named) in [
        (&[AGENT, &["--confg", "x"]].concat() as &[&str], "--confg"),
        (&["host", "borrow"], "SIZE"),
        (&["host", "borrow", "--size", "12parsecs"], "12parsecs"),
        (&["host", "borrow", "--size=-5G"], "-5G"),
        (&["host", "return", "--volume", "xyz"], "xyz"),
        (&["host", "return", "everything"], "everything"),
        (&["lend", "1G"], "lend"),
        (&[], "Usage"),
    ] {
        let answer = Answer::of(&mut cluster["a"].aquifer(words));
        answer.must_fail(2, &[named]);
    }
}

#[test]
fn without_an_agent_commands_say_so() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::admitted(["a"]);
    for words in [&["status"] as &[&str], &["host", "borrow", "--size", "64M"], &["host", "return"]]
    {
        let answer = Answer::of(&mut cluster["a"].aquifer(words));
        answer.must_fail(
            1,
            &[cluster["a"].socket().to_str().unwrap(), "aquifer serve agent --config"],
        );
    }
}

#[test]
fn when_nobody_lends_the_borrower_is_told_why() {
    if lacks_rights() {
        return;
    }
    // `full` has less to spare than the smallest lease.
    let cluster =
        Cluster::new([Spec::new("a"), Spec::new("full").memory(Bytes::mib(64)), Spec::new("dead")]);
    let a = &cluster["a"];
    cluster["dead"].kill_agent();
    let borrow = |size: &str| Answer::of(&mut a.aquifer(&["host", "borrow", "--size", size]));
    borrow("64M").must_fail(
        1,
        &[
            "no host lends 64MiB",
            "full has 51.2MiB to spare",
            "dead does not answer",
            "aquifer status",
        ],
    );
    borrow("0").must_fail(1, &["at least one byte"]);
    borrow("1T").must_fail(1, &["1TiB", "max"]);

    let peers = a.status().peers;
    let peer = |name: &str| peers.iter().find(|peer| peer.host.as_str() == name).unwrap();
    assert!(peer("full").spare.is_some_and(|spare| spare < Bytes::mib(64)), "{peers:?}");
    assert!(
        peer("dead").error.as_ref().is_some_and(|error| error.contains("refused")),
        "{peers:?}"
    );

    a.signal_agent(rustix::process::Signal::TERM);
    a.configure(|config| {
        config.remove("peer");
    });
    a.restart();
    borrow("64M").must_fail(1, &["no host lends 64MiB", "no peers", "[[peer]]"]);
    let returned = a.give_back();
    assert!(returned.volumes.is_empty());
}

#[test]
fn a_volume_that_is_not_borrowed_cannot_be_returned() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a"]);
    let unknown = "0123456789abcdef0123456789abcdef";
    let answer = Answer::of(&mut cluster["a"].aquifer(&["host", "return", "--volume", unknown]));
    answer.must_fail(1, &[unknown, "aquifer status"]);
}

#[test]
fn a_volume_that_cannot_start_returns_its_leases_at_once() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a", "b"]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    std::fs::write(a.spill(), "a file where a directory should be").unwrap();
    let answer = Answer::of(&mut a.aquifer(&["host", "borrow", "--size", "64M"]));
    answer.must_fail(1, &["cannot create the spill directory", a.spill().to_str().unwrap()]);
    wait_until("a and b are free", || a.is_free() && b.is_free());
    assert_eq!(b.roles(), [Role::Lender, Role::Neutral]);
    assert!(!a.has_volumes());
}
