//! Tests of certificates that end soon and renew by themselves. None of these tests swaps.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use aquifer_api::path;
use aquifer_api::status::Standing;
use aquifer_page::Bytes;
use aquifer_transport::tls::{self, Authority, LIFETIME, TEN_YEARS, Validity};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

use super::framework::stranger::connect;
use super::framework::{Answer, Cluster, Host, Identity, Spec, lacks_rights, wait_for, wait_until};
use crate::region::framework::{MEMORY_PROGRAM, Program};

/// A lifetime of which a third passes soon, and all of which passes while a test waits.
const SHORT: Duration = Duration::from_secs(15);

/// Describes a signer that gives short certificates.
fn brief(name: &'static str) -> Spec {
    Spec::new(name)
        .set("certificates", "lifetime", "15s")
        .set("certificates", "for_drills", true)
        .set("lend", "enabled", false)
}

fn validity(host: &Host) -> Validity {
    Validity::of_host(&host.tls()).unwrap()
}

fn is_valid(host: &Host) -> bool {
    !validity(host).left(SystemTime::now()).is_zero()
}

pub(super) fn knows(host: &Host, name: &str, standing: Standing) -> bool {
    let peers = host.try_status().map(|status| status.peers).unwrap_or_default();
    peers.iter().any(|peer| peer.host.as_str() == name && peer.standing == standing)
}

/// A connection to a host's agent that stays open.
pub(super) struct Open(StreamOwned<ClientConnection, TcpStream>);

impl Open {
    pub(super) fn new(from: &Host, to: &Host) -> Self {
        let identity = tls::Identity::load(&from.tls()).unwrap();
        let name = ServerName::try_from(to.name()).unwrap();
        let connection = ClientConnection::new(identity.client_config(), name).unwrap();
        Self(StreamOwned::new(connection, connect(to.api())))
    }

    /// Asks for an offer; returns the status of the answer, or `None` if the connection ended.
    pub(super) fn ask(&mut self) -> Option<u16> {
        let words = format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", path::OFFER);
        self.0.write_all(words.as_bytes()).ok()?;
        let (mut heard, mut some) = (Vec::new(), [0; 4096]);
        loop {
            let text = String::from_utf8_lossy(&heard).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
                if body.len() >= length.parse().ok()? {
                    return head.split(' ').nth(1)?.parse().ok();
                }
            }
            match self.0.read(&mut some).ok()? {
                0 => return None,
                count => heard.extend(&some[..count]),
            }
        }
    }
}

/// Makes the region 'items' of `on`, which borrows its memory, and starts a program that wrote to
/// all of it.
pub(super) fn with_program(cluster: &Cluster, on: &Host) -> Program {
    let words = ["region", "create", "items", "--size", "96M", "--cache", "16M", "--json"];
    let created: serde_json::Value = Answer::of(&mut on.aquifer(&words)).json();
    let region = PathBuf::from(created["file"].as_str().unwrap());
    let disk = cluster.dir().join("disk");
    let (region, disk) = (region.to_str().unwrap(), disk.to_str().unwrap());
    let words = ["region", "exec", "--", "python3", "-c", MEMORY_PROGRAM, region, disk];
    let mut program = Program::start(&mut on.aquifer(&words));
    program.does("write 1");
    program
}

pub(super) fn can_lend(on: &Host, lender: &str) -> bool {
    let peers = on.try_status().map(|status| status.peers).unwrap_or_default();
    peers.iter().any(|peer| peer.host.as_str() == lender && peer.spare > Some(Bytes::ZERO))
}

#[test]
fn renewal_ends_no_connection_and_restarts_no_process() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(brief("a"));
    cluster.join(Spec::new("b").memory(Bytes::mib(512)));
    cluster.join(Spec::new("c").set("lend", "enabled", false));
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    for host in [b, c] {
        assert_eq!(validity(host).lifetime(), SHORT, "{}", host.name());
    }
    wait_until("c knows what b can lend", || can_lend(c, "b"));
    let mut program = with_program(&cluster, c);
    let mut open = Open::new(c, b);
    assert_eq!(open.ask(), Some(200));
    let pids = [a, b, c].map(|host| host.status().agent.pid);
    let engine = || {
        let shown: serde_json::Value =
            Answer::of(&mut c.aquifer(&["region", "show", "items", "--json"])).json();
        shown["pid"].clone()
    };
    let engine_before = engine();
    let first = [a, b, c].map(validity);

    // All of the first certificates' time passes.
    let last = first.iter().map(|first| first.ends).max().unwrap();
    wait_until("the first certificates have ended", || {
        assert_eq!(open.ask(), Some(200), "the open connection goes on");
        SystemTime::now() > last
    });
    // On a busy machine, a renewal may be late.
    wait_until("all have valid certificates", || [a, b, c].into_iter().all(is_valid));
    program.does("check 1");
    assert_eq!([a, b, c].map(|host| host.status().agent.pid), pids);
    assert_eq!(engine(), engine_before);
    // A new connection shows the new certificates of both hosts, to a process beside the agent too.
    wait_until("b answers c", || Open::new(c, b).ask() == Some(200));
    let lease = c.status().loans.regions[0].leases[0].lease;
    let refused = Identity::load(&c.tls()).open(b, lease).err().map(|error| error.to_string());
    assert!(refused.is_none_or(|error| !error.contains("TLS")), "the page port accepts it");
    drop(program);
    wait_until("the region is gone", || {
        Answer::of(&mut c.aquifer(&["region", "rm", "items"])).code == Some(0)
    });
}

#[test]
fn a_host_whose_certificate_ended_returns_with_the_signer() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(brief("a"));
    cluster.join("b");
    cluster.join("c");
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    wait_until("b knows c", || knows(b, "c", Standing::Up));
    let mut open = wait_for("c answers b", || {
        let mut open = Open::new(b, c);
        (open.ask() == Some(200)).then_some(open)
    });
    a.kill_agent();
    // Gossip and open connections go on, and nothing else.
    wait_until("the certificates have ended", || {
        assert_eq!(open.ask(), Some(200), "the open connection goes on");
        !is_valid(b) && !is_valid(c)
    });
    wait_until("b hears gossip of c", || knows(b, "c", Standing::Up));
    let lapsed = Identity::load(&b.tls());
    lapsed.get(c, path::OFFER).unwrap_err();
    // An agent starts with a certificate that has ended.
    b.signal_agent(rustix::process::Signal::TERM);
    b.restart();
    assert!(b.log_text().contains("the certificate of this host has ended"), "{}", b.log_text());

    a.restart();
    wait_until("all have certificates again", || [a, b, c].into_iter().all(is_valid));
    let got = wait_for("c answers b", || Identity::load(&b.tls()).get(c, path::OFFER).ok());
    assert_eq!(got["host"], "c");
    // The former certificate may do nothing but renew, even at the signer.
    let error = lapsed.get(a, path::OFFER).map(|_| ()).map_err(|error| error.to_string());
    assert!(error.is_ok() || error.unwrap_err().contains("it may only renew"));
}

#[test]
fn a_certificate_of_ten_years_is_renewed_to_a_week() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    assert_eq!(validity(b).lifetime(), LIFETIME);
    b.kill_agent();
    let authority = Authority::load(&a.cluster()).unwrap().with_lifetime(TEN_YEARS);
    authority.issue(&b.tls(), &b.host_name(), &[b.api().ip().to_string()], true).unwrap();
    let former = fs::read_to_string(b.tls().join("host.key")).unwrap();
    b.restart();
    // The signer has given no certificate of years to that key.
    wait_until("b is refused", || b.log_text().contains("is of another machine"));
    fs::copy(b.tls().join("host.pem"), a.cluster().join("hosts/b.pem")).unwrap();
    wait_until("b has a short certificate", || validity(b).lifetime() == LIFETIME);
    let renewed = fs::read_to_string(b.tls().join("host.pem")).unwrap();
    assert!(renewed.contains("PRIVATE KEY") && !renewed.contains(&former), "it has a new key");
    wait_until("a knows b", || knows(a, "b", Standing::Up));
    assert_eq!(Identity::load(&b.tls()).get(a, path::OFFER).unwrap()["host"], "a");
}

#[test]
fn doctor_and_status_say_when_a_certificate_ends() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created("a");
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let shown = || Answer::of(&mut b.aquifer(&["status"])).stdout;
    assert!(shown().contains("certificate: 6d 23h left"), "{}", shown());
    let json: serde_json::Value = Answer::of(&mut b.aquifer(&["status", "--json"])).json();
    assert_eq!(json["certificate"]["state"], "good", "{json}");
    assert_eq!(json["certificate"]["lifetime_s"], LIFETIME.as_secs());
    let all = Answer::of(&mut b.aquifer(&["status", "--cluster"])).stdout;
    assert_eq!(all.matches("6d 23h").count(), 2, "{all}");

    // The signer goes away for good, and the days pass.
    a.kill_agent();
    let authority = Authority::load(&a.cluster()).unwrap();
    let aged = |days: u32| {
        let dir = cluster.dir().join(format!("aged-{days}"));
        let request = tls::Request::prepare(&dir, &b.host_name()).unwrap();
        let issued = SystemTime::now() - Duration::from_secs(24 * 3600) * days;
        let names = [b.api().ip().to_string()];
        let pem = authority.sign(request.der(), &b.host_name(), &names, issued).unwrap();
        let key = fs::read_to_string(dir.join("host.key")).unwrap();
        fs::write(b.tls().join("host.pem"), pem + &key).unwrap();
    };
    let doctor = || {
        let mut doctor = b.aquifer(&["doctor", "--json", "--config"]);
        let report = Answer::of(doctor.arg(b.config()));
        let json: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
        let checks = json["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == "certificate").unwrap().clone();
        let text = |key: &str| check[key].as_str().unwrap_or_default().to_owned();
        (text("verdict"), text("found"), text("help"))
    };
    aged(5);
    wait_until("status says it", || shown().contains("not renewed"));
    let (verdict, found, help) = doctor();
    assert!(verdict == "warn" && found.contains("1d 23h left"), "{verdict} {found}");
    assert!(help.contains("aquifer cluster status"), "{help}");
    aged(8);
    let (verdict, found, help) = doctor();
    assert!(verdict == "missing" && found.contains("it has ended"), "{verdict} {found}");
    assert!(help.contains("aquifer cluster status"), "{help}");
    aged(60);
    let (_, found, help) = doctor();
    assert!(found.contains("30 days ago") && help.contains("aquifer cluster join"), "{found}");
    // It may be the clock, so the agent starts.
    b.signal_agent(rustix::process::Signal::TERM);
    b.restart();
    wait_until("the log names the clock", || b.log_text().contains("check the clock"));
    // A signer that is back renews what ended a day ago.
    aged(8);
    a.restart();
    wait_until("b has a certificate again", || is_valid(b));
}
