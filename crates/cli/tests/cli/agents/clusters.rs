//! Tests of clusters that hosts join: no file of another host changes, and each host knows which
//! others live. None of these tests swaps.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use aquifer_api::status::{EventKind, Peer, Standing};
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::framework::stranger::{connect, until_closed};
use super::framework::{
    Answer, Cluster, Host, Identity, STEP_TIMEOUT, Spec, Stranger, address, lacks_rights,
    wait_until,
};
use crate::common::binary;

fn peers(host: &Host) -> Vec<Peer> {
    host.try_status().map(|status| status.peers).unwrap_or_default()
}

fn knows(host: &Host, name: &str, standing: Standing) -> bool {
    peers(host).iter().any(|peer| peer.host.as_str() == name && peer.standing == standing)
}

/// Returns the files that an operator may edit, with their content.
fn edited(host: &Host) -> Vec<(PathBuf, Vec<u8>)> {
    let tls = fs::read_dir(host.tls()).unwrap().map(|entry| entry.unwrap().path());
    let files = tls.chain([host.config()]);
    let mut files: Vec<_> = files.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    files.sort();
    files
}

fn three() -> Cluster {
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    cluster.join("c");
    cluster
}

#[test]
fn a_host_that_joins_is_known_to_all_and_no_file_is_edited() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let before = ["a", "b"].map(|name| edited(&cluster[name]));
    cluster.join("c");
    for (host, others) in [("a", ["b", "c"]), ("b", ["a", "c"]), ("c", ["a", "b"])] {
        wait_until(&format!("{host} knows what the others can lend"), || {
            let peers = peers(&cluster[host]);
            others.iter().all(|other| {
                let known = peers.iter().find(|peer| peer.host.as_str() == *other);
                known.is_some_and(|peer| {
                    peer.standing == Standing::Up && peer.spare > Some(Bytes::ZERO)
                })
            })
        });
    }
    assert_eq!(before, ["a", "b"].map(|name| edited(&cluster[name])));
    let shown = Answer::of(&mut cluster["c"].aquifer(&["cluster", "status"])).stdout;
    assert!(shown.contains("this host") && shown.contains("admits hosts"), "{shown}");
    assert!(!edited(&cluster["c"]).iter().any(|(path, _)| path.ends_with("ca.key")));
}

#[test]
fn a_host_that_dies_is_down_and_comes_back_after_a_reboot() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    wait_until("c knows a and b", || ["a", "b"].iter().all(|of| knows(c, of, Standing::Up)));
    b.kill_agent();
    for host in [a, c] {
        wait_until("the others know that b is down", || knows(host, "b", Standing::Down));
    }
    let events = a.status().history.events;
    let down = |event: &&aquifer_api::status::Event| event.kind == EventKind::HostDown;
    assert_eq!(events.iter().filter(down).count(), 1, "{events:?}");

    // All are rebooted: what is in /run is gone.
    for host in [a, b, c] {
        if host.name() != "b" {
            host.kill_agent();
        }
        fs::remove_dir_all(host.state()).unwrap();
    }
    // The signer stays away.
    b.restart();
    c.restart();
    wait_until("b knows c", || knows(b, "c", Standing::Up) && knows(b, "a", Standing::Down));
    a.restart();
    for (host, other) in [(a, "b"), (b, "a"), (c, "a"), (a, "c")] {
        wait_until("all know all", || knows(host, other, Standing::Up));
    }
}

#[test]
fn a_host_that_stops_says_so() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b) = (&cluster["a"], &cluster["b"]);
    wait_until("a knows b", || knows(a, "b", Standing::Up));
    b.signal_agent(Signal::TERM);
    wait_until("a knows that b is down", || knows(a, "b", Standing::Down));
}

/// A host that is not in the cluster yet.
pub(super) struct Outsider<'a> {
    cluster: &'a Cluster,
    dir: PathBuf,
    address: Ipv4Addr,
}

impl<'a> Outsider<'a> {
    pub(super) fn new(cluster: &'a Cluster, dir: &str) -> Self {
        Self { cluster, dir: cluster.dir().join(dir), address: address() }
    }

    pub(super) fn join(&self, through: &Host, token: &str, name: &str) -> Answer {
        let signer = through.api().to_string();
        let mut command = binary().command(self.cluster.dir());
        command.args(["cluster", "join", &signer, "--token", token, "--host", name]);
        command.args(["--address", &self.address.to_string()]);
        command.args(["--zone", "rack-1", "--accept-vms"]);
        command.arg("--config").arg(self.dir.join("agent.toml"));
        command.arg("--cluster-dir").arg(self.dir.join("cluster"));
        Answer::of(&mut command)
    }

    fn is_outside(&self) -> bool {
        !Path::new(&self.dir).join("tls/host.pem").exists() && !self.dir.join("agent.toml").exists()
    }
}

#[test]
fn a_host_is_refused_with_the_reason_and_the_way_out() {
    if lacks_rights() {
        return;
    }
    let cluster = three();
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let other = Cluster::created("z");
    let new = Outsider::new(&cluster, "new");
    wait_until("b knows a", || knows(b, "a", Standing::Up) && peers(b)[0].admits);

    let signer = a.api().to_string();
    new.join(b, cluster.token(), "d").must_fail(1, &["b cannot admit hosts", &signer, "(a)"]);
    new.join(a, cluster.token(), "b").must_fail(1, &["the name b is taken", "--host"]);
    new.join(a, cluster.token(), "a").must_fail(1, &["the name a is taken", "--host"]);
    new.join(a, cluster.token(), "B").must_fail(1, &["the name B is taken", "--host"]);
    let elsewhere =
        Outsider { address: Ipv4Addr::new(192, 0, 2, 77), ..Outsider::new(&cluster, "far") };
    let far = "192.0.2.77 is not an address of this host";
    elsewhere.join(a, cluster.token(), "d").must_fail(1, &[far, "--address"]);
    new.join(a, other.token(), "d").must_fail(1, &["not of the cluster that made this token"]);
    new.join(a, "xyz", "d").must_fail(2, &["this is not a token"]);
    let mut brief = a.aquifer(&["cluster", "token", "--json", "--life", "0s", "--config"]);
    let brief: serde_json::Value = Answer::of(brief.arg(a.config())).json();
    let ended = brief["token"].as_str().unwrap();
    new.join(a, ended, "d").must_fail(1, &["the token has ended", "aquifer cluster token"]);
    let mut token = b.aquifer(&["cluster", "token", "--config"]);
    Answer::of(token.arg(b.config())).must_fail(1, &["b cannot admit hosts"]);
    assert!(new.is_outside());

    // The answer of the signer was lost: the host has a key and no certificate.
    let again = Outsider::new(&cluster, "again");
    assert_eq!(again.join(a, cluster.token(), "d").code, Some(0));
    let config = fs::read_to_string(again.dir.join("agent.toml")).unwrap();
    assert!(config.contains("\nzone = \"rack-1\"\n") && config.contains("\naccept = true\n"));
    fs::remove_file(again.dir.join("tls/host.pem")).unwrap();
    assert_eq!(again.join(a, cluster.token(), "d").code, Some(0));
    again.join(a, cluster.token(), "d").must_fail(1, &["belongs to a cluster", "tls"]);
}

#[test]
fn a_host_that_leaves_is_gone_and_its_name_is_free() {
    if lacks_rights() {
        return;
    }
    let mut cluster = three();
    wait_until("c knows a", || knows(&cluster["c"], "a", Standing::Up));
    let leave = |host: &Host| {
        let mut leave = host.aquifer(&["cluster", "leave", "--config"]);
        Answer::of(leave.arg(host.config()))
    };
    leave(&cluster["a"]).must_fail(1, &["the only host that can admit others"]);
    let c = &cluster["c"];
    let left = leave(c);
    assert_eq!(left.code, Some(0), "{left:?}");
    wait_until("the agent of c ends", || c.ended().is_some());
    wait_until("b forgets c", || peers(&cluster["b"]).iter().all(|peer| peer.host.as_str() != "c"));
    for file in ["tls/host.pem", "tls/host.key", "tls/ca.pem", "cluster/gossip.key"] {
        assert!(!c.dir().join(file).exists(), "{file}");
    }
    leave(c).must_fail(1, &["no agent answers"]);
    // A new machine takes the name.
    cluster.forget("c");
    cluster.join("c");
    wait_until("b knows the new c", || knows(&cluster["b"], "c", Standing::Up));
}

#[test]
fn a_host_whose_lender_is_silent_leaves_once_that_answers() {
    if lacks_rights() {
        return;
    }
    let keeps = |name| Spec::new(name).set("lend", "enabled", false);
    let mut cluster = Cluster::created(keeps("a"));
    cluster.join(Spec::new("b").memory(Bytes::mib(512)));
    cluster.join(keeps("c"));
    let (b, c) = (&cluster["b"], &cluster["c"]);
    wait_until("c knows what b can lend", || {
        peers(c).iter().any(|peer| peer.host.as_str() == "b" && peer.spare > Some(Bytes::ZERO))
    });
    let create = ["region", "create", "items", "--size", "96M", "--cache", "16M"];
    assert_eq!(Answer::of(&mut c.aquifer(&create)).code, Some(0));
    let b_agent = Pid::from_raw(b.status().agent.pid.cast_signed()).unwrap();
    kill_process(b_agent, Signal::STOP).unwrap();
    assert_eq!(Answer::of(&mut c.aquifer(&["region", "rm", "items"])).code, Some(0));
    let leave = || {
        let mut leave = c.aquifer(&["cluster", "leave", "--config"]);
        leave.arg(c.config());
        leave
    };
    Answer::of(&mut leave()).must_fail(1, &["this host is about to borrow or to return memory"]);
    // Ctrl-C leaves nothing half done.
    let mut given_up = leave().spawn().unwrap();
    kill_process(Pid::from_child(&given_up), Signal::INT).unwrap();
    assert!(!given_up.wait().unwrap().success());
    assert!(c.ended().is_none() && c.dir().join("tls/host.pem").exists());
    kill_process(b_agent, Signal::CONT).unwrap();
    wait_until("b has its memory back", || b.is_free());
    assert_eq!(Answer::of(&mut leave()).code, Some(0));
    wait_until("the agent of c ends", || c.ended().is_some());
}

#[test]
fn a_signer_stays_while_a_host_that_joined_has_not_left() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::created("a");
    let a = &cluster["a"];
    // The agent of this host never starts.
    let silent = Outsider::new(&cluster, "silent");
    assert_eq!(silent.join(a, cluster.token(), "b").code, Some(0));
    let leave = |arguments: &[&str], config: &Path| {
        let mut leave = a.aquifer(&[&["cluster", "leave"], arguments].concat());
        Answer::of(leave.arg("--config").arg(config))
    };
    leave(&[], &a.config()).must_fail(1, &["only host that can admit others", "b have joined"]);
    leave(&["--force"], &a.config()).must_fail(1, &["the agent of a runs", "without --force"]);

    // No agent of b runs to tell the others.
    let config = silent.dir.join("agent.toml");
    let nowhere = silent.dir.join("none.sock");
    let nowhere = nowhere.to_str().unwrap();
    leave(&["--socket", nowhere], &config).must_fail(1, &["no agent answers", "--force"]);
    let left = leave(&["--force", "--socket", nowhere], &config);
    assert!(left.code == Some(0) && left.stdout.contains("its name stays taken"), "{left:?}");
    assert!(!silent.dir.join("tls/host.pem").exists() && !silent.dir.join("cluster").exists());
    let mut forget = a.aquifer(&["cluster", "forget", "b", "--config"]);
    assert_eq!(Answer::of(forget.arg(a.config())).code, Some(0));
    assert_eq!(silent.join(a, cluster.token(), "b").code, Some(0));
}

#[test]
fn tokens_that_are_made_at_once_all_admit() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::created("a");
    let a = &cluster["a"];
    let made: Vec<String> = std::thread::scope(|scope| {
        let one = || {
            let mut token = a.aquifer(&["cluster", "token", "--json", "--config"]);
            let made: serde_json::Value = Answer::of(token.arg(a.config())).json();
            made["token"].as_str().unwrap().to_owned()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (number, token) in made.iter().enumerate() {
        let name = format!("h{number}");
        let host = Outsider::new(&cluster, &name);
        assert_eq!(host.join(a, token, &name).code, Some(0), "{name}");
    }
}

#[test]
fn an_interrupted_create_is_repeated_and_is_no_place_to_join() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::created("a");
    let half = Outsider::new(&cluster, "half");
    let create = || {
        let mut command = binary().command(cluster.dir());
        command.args(["cluster", "create", "--host", "h", "--json"]);
        command.args(["--address", &half.address.to_string()]);
        command.arg("--config").arg(half.dir.join("agent.toml"));
        command.arg("--cluster-dir").arg(half.dir.join("cluster"));
        Answer::of(&mut command)
    };
    let first: serde_json::Value = create().json();
    assert!(first["token"].is_string(), "{first}");
    create().must_fail(1, &["belongs to a cluster"]);
    for file in ["tls/host.pem", "agent.toml"] {
        fs::remove_file(half.dir.join(file)).unwrap();
    }
    half.join(&cluster["a"], cluster.token(), "h").must_fail(1, &["cluster create", "holds"]);
    assert_eq!(create().code, Some(0));
    for file in ["tls/host.pem", "cluster/ca.key"] {
        fs::remove_file(half.dir.join(file)).unwrap();
    }
    assert_eq!(create().code, Some(0));
}

#[test]
fn a_host_that_was_lost_gives_its_name_to_a_new_machine() {
    if lacks_rights() {
        return;
    }
    let mut cluster = three();
    let forget = |on: &Host, name: &str| {
        let mut forget = on.aquifer(&["cluster", "forget", name, "--config"]);
        Answer::of(forget.arg(on.config()))
    };
    wait_until("a knows c", || knows(&cluster["a"], "c", Standing::Up));
    forget(&cluster["a"], "c").must_fail(1, &["c is up", "aquifer cluster leave"]);
    forget(&cluster["b"], "c").must_fail(1, &["b cannot admit hosts"]);
    cluster["c"].kill_agent();
    wait_until("a knows that c is down", || knows(&cluster["a"], "c", Standing::Down));
    cluster.forget("c");
    let refused = Outsider::new(&cluster, "new").join(&cluster["a"], cluster.token(), "c");
    refused.must_fail(1, &["the name c is taken", "aquifer cluster forget c"]);
    assert_eq!(forget(&cluster["a"], "c").code, Some(0));
    forget(&cluster["a"], "c").must_fail(1, &["the name is free", "--force"]);
    cluster.join("c");
    wait_until("b knows the new c", || knows(&cluster["b"], "c", Standing::Up));
}

#[test]
fn a_certificate_of_another_cluster_opens_nothing() {
    if lacks_rights() {
        return;
    }
    let (cluster, other) = (Cluster::created("a"), Cluster::created("z"));
    let stranger = Identity::load(&other["z"].tls());
    stranger.get(&cluster["a"], aquifer_api::path::OFFER).unwrap_err();
    // A caller without any certificate may only ask to join.
    let client = cluster_client(&cluster["a"]);
    for path in [aquifer_api::path::OFFER, aquifer_api::path::STATUS] {
        let got = aquifer_hosts::block_on(client.get::<serde_json::Value>(path));
        let error = got.unwrap_err().to_string();
        assert!(error.contains("only"), "{error}");
    }
}

/// Returns a client that trusts the host's cluster, and has no certificate.
fn cluster_client(host: &Host) -> aquifer_api::client::Client {
    let ca = fs::read_to_string(host.tls().join("ca.pem")).unwrap();
    let fingerprint = aquifer_transport::tls::fingerprint(&ca).unwrap();
    let config = aquifer_transport::tls::joining_config(fingerprint).unwrap();
    aquifer_api::client::Client::of_any_host(&host.api().to_string(), config.into())
}

#[test]
fn strangers_that_never_finish_a_request_keep_no_host_out() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], Identity::load(&cluster["b"].tls()));
    let stranger = Stranger::new(&a.tls().join("ca.pem"));
    let words = b"POST /v1/join HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
                  content-length: 1000\r\n\r\n{";
    let begin = |_| stranger.begin(connect(a.api()), a, words);
    let mut unfinished: Vec<_> = (0..300).map(begin).collect();
    b.get(a, aquifer_api::path::OFFER).unwrap();
    // The agent closes the newest, too, in the end.
    let newest = unfinished.last_mut().unwrap();
    newest.sock.set_read_timeout(Some(2 * STEP_TIMEOUT)).unwrap();
    assert!(!String::from_utf8_lossy(&until_closed(newest)).contains("certificate"));
    // Another host still joins.
    cluster.join("c");
}

#[test]
fn a_host_that_lost_its_cluster_directory_says_so() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    wait_until("a knows b", || knows(a, "b", Standing::Up));
    b.kill_agent();
    let (directory, away) = (b.dir().join("cluster"), b.dir().join("away"));
    fs::rename(&directory, &away).unwrap();
    b.restart();
    assert!(peers(b).is_empty() && b.log_text().contains("lacks gossip.key"), "{}", b.log_text());
    b.signal_agent(Signal::TERM);
    fs::rename(&away, &directory).unwrap();
    b.restart();
    for (host, other) in [(a, "b"), (b, "a")] {
        wait_until("they know each other again", || knows(host, other, Standing::Up));
    }
}

#[test]
fn an_agent_of_a_cluster_names_an_address_that_others_can_reach() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::created(Spec::new("a"));
    let a = &cluster["a"];
    a.signal_agent(Signal::TERM);
    a.configure(|config| _ = config.insert("listen".to_owned(), "0.0.0.0:7070".into()));
    a.refusal().must_fail(1, &["listen", "reach this host"]);
}
