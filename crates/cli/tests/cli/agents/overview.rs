//! Tests of the table of all hosts: each host is a row, also one that is dead, lies, or has left.
//! None of these tests swaps.

use aquifer_api::cluster::{ClusterHost, Summary};
use aquifer_api::path;
use aquifer_api::status::{Ledger, Role, Standing};
use aquifer_page::{Bytes, HostName};
use rustix::process::{Pid, Signal, kill_process};

use super::framework::{Answer, Cluster, Host, Identity, Impostor, lacks_rights, wait_until};

fn rows(on: &Host) -> Vec<ClusterHost> {
    Answer::of(&mut on.aquifer(&["status", "--cluster", "--json"])).json()
}

fn text(on: &Host) -> String {
    let answer = Answer::of(&mut on.aquifer(&["status", "--cluster"]));
    assert_eq!(answer.code, Some(0), "{answer:?}");
    answer.stdout
}

#[track_caller]
fn row<'a>(rows: &'a [ClusterHost], host: &str) -> &'a ClusterHost {
    rows.iter().find(|row| row.peer.host.as_str() == host).unwrap()
}

fn names(rows: &[ClusterHost]) -> Vec<&str> {
    rows.iter().map(|row| row.peer.host.as_str()).collect()
}

fn has_row(on: &Host, host: &str, is_right: impl Fn(&ClusterHost) -> bool) -> bool {
    rows(on).iter().any(|row| row.peer.host.as_str() == host && is_right(row))
}

fn three() -> Cluster {
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    cluster.join("c");
    for host in ["a", "b", "c"] {
        wait_until("all hosts know each other", || {
            let rows = rows(&cluster[host]);
            names(&rows) == ["a", "b", "c"] && rows.iter().all(|row| row.summary.is_some())
        });
    }
    cluster
}

/// Hosts of a fixed list without gossip; the agents of the others do not run.
fn listed(running: [&'static str; 2], others: &[&'static str]) -> Cluster {
    let cluster = Cluster::admitted([&running[..], others].concat());
    running.iter().for_each(|host| cluster[host].start());
    running.iter().for_each(|host| cluster[host].wait_until_ready());
    cluster
}

#[test]
fn any_host_shows_all_hosts_and_their_sum() {
    if lacks_rights() {
        return;
    }
    let cluster = listed(["a", "b"], &["z"]);
    let z = Identity::load(&cluster["z"].tls());
    let request = serde_json::json!({
        "request": "0".repeat(31) + "1", "bytes": "64M", "group": "default",
    });
    z.post(&cluster["a"], path::MEM_BOR_REQ, &request).unwrap();
    for on in ["a", "b"] {
        wait_until("the row of a shows the lease", || {
            has_row(&cluster[on], "a", |row| {
                let lent = &row.summary.as_ref().unwrap().lent;
                lent.get(&"z".parse::<HostName>().unwrap()) == Some(&Bytes::mib(64))
            })
        });
        let rows = rows(&cluster[on]);
        assert_eq!(names(&rows), ["a", "b", "z"]);
        for ClusterHost { peer, summary } in &rows[..2] {
            let own = summary.as_ref().unwrap();
            let status = cluster[peer.host.as_str()].status();
            assert_eq!(peer.error, None);
            assert_eq!((own.ledger.total, own.vms), (status.ledger.total, Some(0)));
            assert_eq!(
                (&own.version, &own.address),
                (&status.agent.version, &status.membership.address)
            );
            assert!(own.ledger.adds_up() && !own.draining, "{own:?}");
        }
        assert_eq!(row(&rows, "a").summary.as_ref().unwrap().role, Role::Lender);
        let text = text(&cluster[on]);
        assert!(text.contains("z 64MiB") && text.contains("2 of 3 answer"), "{text}");
        // 256 MiB a host.
        let total = text.lines().find(|line| line.trim_start().starts_with("TOTAL"));
        assert!(total.is_some_and(|line| line.contains("512MiB")), "{text}");
        assert!(text.contains("\nz: no agent answers"), "{text}");
    }
    Answer::of(&mut cluster["b"].aquifer(&["host", "drain"]));
    assert!(text(&cluster["a"]).contains("up, draining"));
}

#[test]
fn a_dead_host_and_a_stopped_one_are_rows_that_say_so() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    wait_until("a knows what b can lend", || {
        let peers = a.status().peers;
        peers.iter().any(|peer| peer.host.as_str() == "b" && peer.spare > Some(Bytes::ZERO))
    });
    // The kernel still takes connections for c.
    let c_agent = Pid::from_raw(c.status().agent.pid.cast_signed()).unwrap();
    kill_process(c_agent, Signal::STOP).unwrap();
    b.kill_agent();
    let first = rows(a);
    assert_eq!(names(&first), ["a", "b", "c"]);
    for host in ["b", "c"] {
        let ClusterHost { peer, summary } = row(&first, host);
        assert!(summary.is_none() && peer.error.is_some(), "{peer:?}");
    }
    let silent = row(&first, "c").peer.error.as_ref().unwrap();
    assert!(silent.contains("did not answer 'GET /v1/summary' within 2 s"), "{silent}");
    wait_until("gossip takes b for down", || {
        has_row(a, "b", |row| row.peer.standing == Standing::Down)
    });
    let all = rows(a);
    let peer = &row(&all, "b").peer;
    assert!(peer.spare > Some(Bytes::ZERO), "what gossip knew is gone: {peer:?}");
    assert!(peer.spare_s >= peer.since_s && peer.since_s.is_some(), "{peer:?}");
    let text = text(a);
    assert!(text.contains("1 of 3 answer") && text.contains("down for "), "{text}");
    assert!(text.contains("it last told") && text.contains("\nb: no agent answers"), "{text}");
    kill_process(c_agent, Signal::CONT).unwrap();
    wait_until("c answers again", || has_row(a, "c", |row| row.summary.is_some()));
    b.restart();
    wait_until("b answers again", || {
        has_row(a, "b", |row| row.summary.is_some() && row.peer.standing == Standing::Up)
    });
}

#[test]
fn a_host_that_left_is_a_row_that_says_since_when() {
    if lacks_rights() {
        return;
    }
    let mut cluster = three();
    let c = &cluster["c"];
    let mut leave = c.aquifer(&["cluster", "leave", "--config"]);
    assert_eq!(Answer::of(leave.arg(c.config())).code, Some(0));
    for on in ["a", "b"] {
        wait_until("the others know that c has left", || {
            has_row(&cluster[on], "c", |row| row.peer.standing == Standing::Left)
        });
        let rows = rows(&cluster[on]);
        let ClusterHost { peer, summary } = row(&rows, "c");
        assert!(summary.is_none() && peer.error.is_none() && peer.since_s.is_some(), "{peer:?}");
        let text = text(&cluster[on]);
        assert!(text.contains("left ") && text.contains("2 of 2 answer"), "{text}");
        // It is no peer any more.
        let peers = cluster[on].status().peers;
        assert!(peers.iter().all(|peer| peer.host.as_str() != "c"), "{peers:?}");
    }
    cluster.forget("c");
    cluster.join("c");
    wait_until("a new c is up", || {
        has_row(&cluster["a"], "c", |row| {
            row.summary.is_some() && row.peer.standing == Standing::Up
        })
    });
}

/// Returns a whole HTTP answer with this summary.
fn answer(summary: &Summary) -> Vec<u8> {
    let body = serde_json::to_string(summary).unwrap();
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn hosts_that_lie_are_named_and_the_others_are_shown() {
    if lacks_rights() {
        return;
    }
    let liars = ["garbage", "half", "mute", "named", "sum", "text", "twin"];
    let cluster = listed(["a", "b"], &liars);
    let a = &cluster["a"];
    let true_one = row(&rows(a), "b").summary.clone().unwrap();
    let as_host = |host: &str| Summary { host: host.parse().unwrap(), ..true_one.clone() };
    Impostor::answer(&cluster["garbage"], b"\x00\xff\x1b[2Jnot http\r\n\r\n");
    Impostor::answer(&cluster["half"], b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{\"host\":");
    Impostor::be_silent(&cluster["mute"]);
    Impostor::answer(&cluster["named"], &answer(&as_host("b")));
    let too_much = Ledger { free: Bytes::gib(999), ..true_one.ledger };
    Impostor::answer(&cluster["sum"], &answer(&Summary { ledger: too_much, ..as_host("sum") }));
    let problem = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 11\r\n\r\n\x1b[2Jgo away";
    Impostor::answer(&cluster["text"], problem);
    Impostor::answer_as(&cluster["twin"], &cluster["b"].tls());

    let shown = rows(a);
    assert_eq!(names(&shown), [&["a", "b"][..], &liars].concat());
    for (host, why) in [
        ("garbage", "no agent answers"),
        ("half", "no agent answers"),
        ("mute", "did not answer"),
        ("named", "has the certificate of named, but calls itself b"),
        ("sum", "the account of sum does not add up"),
        ("text", "go away"),
        ("twin", "do not trust each other's certificates"),
    ] {
        let ClusterHost { peer, summary } = row(&shown, host);
        let error = peer.error.as_ref().unwrap();
        assert!(summary.is_none() && error.contains(why), "{host}: {error}");
        assert!(!error.contains('\x1b'), "{error:?}");
    }
    for host in ["a", "b"] {
        let own = row(&shown, host).summary.as_ref().unwrap();
        assert_eq!(own.ledger.total, Bytes::mib(256));
    }
    let text = text(a);
    assert!(text.contains("2 of 9 answer") && text.contains("512MiB"), "{text}");
    assert!(text.contains("\nsum: the account of sum"), "{text}");
}

#[test]
fn only_hosts_of_the_cluster_learn_a_summary() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a", "b"]);
    let (a, b) = (&cluster["a"], Identity::load(&cluster["b"].tls()));
    let own: Summary = serde_json::from_value(b.get(a, path::SUMMARY).unwrap()).unwrap();
    assert_eq!(own.host.as_str(), "a");
    let other = Identity::load(&cluster.admit("z"));
    let error = other.get(a, path::SUMMARY).unwrap_err().to_string();
    assert!(error.contains("z is not a peer of a"), "{error}");
    // Only the operator of a host makes it call all others.
    let error = b.get(a, path::CLUSTER).unwrap_err().to_string();
    assert!(error.contains("only this host may call"), "{error}");
}
