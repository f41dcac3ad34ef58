//! Tests of access: which callers are let in, and which learn nothing.

use std::net::SocketAddr;

use aquifer_api::client::CallError;
use aquifer_api::message::{MemBorFin, MemBorReq, MemLenFin, Renew};
use aquifer_api::path;
use aquifer_api::status::{Lent, LoanState};
use aquifer_control::RequestId;
use aquifer_nbd::proto::{option, reply};
use aquifer_page::{Bytes, Group, PAGE_SIZE};

use super::framework::stranger::{
    ask, connect, greeted, say, send_option, start_tls, until_closed,
};
use super::framework::{
    Cluster, Host, Identity, STEP_TIMEOUT, address, init, lacks_rights, wait_for,
};

/// A lender `b`, a third host `c`, and a lease that the test holds in the name of `a`.
struct Scene {
    cluster: Cluster,
    lease: Lent,
    /// The content of the lease's first page.
    page: [u8; PAGE_SIZE],
}

impl Scene {
    fn set() -> Self {
        let cluster = Cluster::admitted(["a", "b", "c"]);
        for host in ["b", "c"] {
            cluster[host].start();
        }
        for host in ["b", "c"] {
            cluster[host].wait_until_ready();
        }
        let lease = lend(&cluster["b"], &Identity::load(&cluster["a"].tls()));
        let page = [0x5a; PAGE_SIZE];
        Identity::load(&cluster["a"].tls())
            .open(&cluster["b"], lease.lease)
            .unwrap()
            .write(0, &page)
            .unwrap();
        Self { cluster, lease, page }
    }

    fn lender(&self) -> &Host {
        &self.cluster["b"]
    }

    /// Asserts that the lender is unharmed: same agent, same lease, and unchanged page.
    #[track_caller]
    fn goes_on(&self, pid: u32) {
        let status = self.lender().status();
        assert_eq!(status.agent.pid, pid, "the agent has restarted");
        let [lent] = &status.loans.lent[..] else { panic!("{:?}", status.loans.lent) };
        assert_eq!(lent.lease, self.lease.lease);
        let mut page = [0; PAGE_SIZE];
        let borrower = Identity::load(&self.cluster["a"].tls());
        borrower.open(self.lender(), self.lease.lease).unwrap().read(0, &mut page).unwrap();
        assert_eq!(page, self.page);
    }
}

/// Lets `lender` grant one extent to the holder of this certificate.
#[track_caller]
fn lend(lender: &Host, to: &Identity) -> Lent {
    to.post(lender, path::MEM_BOR_REQ, &request()).unwrap();
    wait_for("the lease is granted", || {
        lender.status().loans.lent.into_iter().find(|lent| lent.state != LoanState::Opening)
    })
}

fn request() -> MemBorReq {
    MemBorReq {
        request: RequestId(1),
        bytes: Bytes::mib(64),
        region: None,
        group: Group::default(),
        goes_first: false,
    }
}

const ASK_STATUS: &[u8] = b"GET /v1/status HTTP/1.1\r\nhost: b\r\n\r\n";
const ASK_OFFER: &[u8] = b"GET /v1/offer HTTP/1.1\r\nhost: b\r\n\r\n";

/// Asserts that the answer discloses nothing: no JSON, no lease, no host name.
#[track_caller]
fn assert_tells_nothing(heard: &[u8], scene: &Scene) {
    let text = String::from_utf8_lossy(heard);
    for secret in [&scene.lease.lease.to_string(), "\"host\"", "{", "HTTP/1.1 200"] {
        assert!(!text.contains(secret), "the answer contains '{secret}': {text}");
    }
    let has_page_data = heard.windows(16).any(|part| part == &scene.page[..16]);
    assert!(!has_page_data, "the answer contains page data: {text}");
}

#[test]
fn without_a_certificate_nothing_is_told_on_either_port() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let (b, stranger) = (scene.lender(), scene.cluster.stranger());
    let pid = b.status().agent.pid;
    for words in
        [ASK_STATUS, ASK_OFFER, b"POST /v1/borrow HTTP/1.1\r\nhost: b\r\ncontent-length: 0\r\n\r\n"]
    {
        let heard = stranger.say_under_tls(b.api(), b, words);
        assert!(heard.is_empty(), "{}", String::from_utf8_lossy(&heard));
    }
    let mut list = Vec::new();
    send_option(&mut list, option::LIST, b"");
    let heard = stranger.say_on(start_tls(b.pages()), b, &list);
    assert!(heard.is_empty(), "{}", String::from_utf8_lossy(&heard));
    scene.goes_on(pid);
}

#[test]
fn a_foreign_certificate_opens_nothing_in_the_borrowers_name() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let elsewhere = tempfile::tempdir().unwrap();
    init(elsewhere.path(), [("a", address())]);
    let forged = Identity::trusting(&elsewhere.path().join("a/tls"), &scene.cluster["a"].tls());
    for path in [path::OFFER, path::STATUS, path::OPENAPI] {
        let error = forged.get(b, path).unwrap_err();
        assert!(matches!(error, CallError::Untrusted { .. }), "{error}");
    }
    let error = forged
        .post(b, path::MEM_BOR_FIN, &MemBorFin { lease: scene.lease.lease, generation: 0 })
        .unwrap_err();
    assert!(matches!(error, CallError::Untrusted { .. }), "{error}");
    forged.open(b, scene.lease.lease).unwrap_err();
    scene.goes_on(pid);
}

#[test]
fn clients_without_tls_learn_nothing_and_are_disconnected() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let nbd_client = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0; 8]].concat();
    let noise: Vec<u8> =
        (0..100_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for port in [b.api(), b.pages()] {
        for words in [ASK_STATUS, b"\n", b"\x16\x03\x01\xff\xff\x01", &nbd_client, &noise] {
            // One client leaves in mid-sentence, one waits for an answer.
            drop(connect(port));
            leave_after(port, words);
            if words.len() > 20 {
                assert_tells_nothing(&say(port, words), &scene);
            }
        }
    }
    scene.goes_on(pid);
}

fn leave_after(port: SocketAddr, words: &[u8]) {
    use std::io::Write as _;
    let _ = connect(port).write_all(words);
}

#[test]
fn an_nbd_client_without_tls_gets_only_the_hint_to_use_tls() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let lease = scene.lease.lease.to_string();
    let mut stream = connect(b.pages());
    greeted(&mut stream);
    let name = u32::try_from(lease.len()).unwrap().to_be_bytes();
    let go = [&name[..], lease.as_bytes(), &[0; 2]].concat();
    for (option, payload) in [(option::LIST, &b""[..]), (option::INFO, &go), (option::GO, &go)] {
        assert_eq!(ask(&mut stream, option, payload), reply::ERR_TLS_REQD);
    }
    send_option(&mut stream, option::EXPORT_NAME, lease.as_bytes());
    assert!(until_closed(&mut stream).is_empty());
    scene.goes_on(pid);
}

#[test]
fn a_host_cannot_open_list_or_end_the_lease_of_another() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let (borrower, other) =
        (Identity::load(&scene.cluster["a"].tls()), Identity::load(&scene.cluster["c"].tls()));
    let lease = scene.lease.lease;

    assert_eq!(borrower.exports(b), [lease.to_string()]);
    assert!(other.exports(b).is_empty());
    let refused = other.open(b, lease).unwrap_err().to_string();
    let unknown = other.open(b, aquifer_page::LeaseId(7)).unwrap_err().to_string();
    // The error must not even disclose that there is such a lease.
    let neutral = |text: &str, lease: String| text.replace(&lease, "…");
    assert_eq!(
        neutral(&refused, lease.to_string()),
        neutral(&unknown, aquifer_page::LeaseId(7).to_string())
    );

    other.post(b, path::MEM_BOR_FIN, &MemBorFin { lease, generation: 0 }).unwrap();
    other.post(b, path::MEM_LEN_FIN, &MemLenFin { lease, generation: 0 }).unwrap();
    other
        .post(
            b,
            path::RENEW,
            &Renew { moved: Vec::new(), leases: vec![lease], io_timeout_ms: None },
        )
        .unwrap();
    let decisions = b.status().history.decisions;
    let ignored = decisions.iter().any(|decision| decision.what.contains("ignores c"));
    assert!(ignored, "{decisions:?}");
    scene.goes_on(pid);

    // The lease's borrower can end it, so the attempts above were valid messages.
    borrower.post(b, path::MEM_BOR_FIN, &MemBorFin { lease, generation: 0 }).unwrap();
    assert!(b.status().loans.lent.is_empty());
    assert!(b.lease_files().is_empty(), "{:?}", b.lease_files());
}

#[test]
fn a_host_that_is_no_peer_is_refused_with_the_reason() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let newcomer = Identity::load(&scene.cluster.admit("d"));
    let error = newcomer.post(b, path::MEM_BOR_REQ, &request()).unwrap_err();
    assert_eq!(error.to_string(), "d is not a peer of b");
    assert!(
        error.help().unwrap().contains("add a [[peer]] named d to the configuration of b"),
        "{error:?}"
    );
    let error = newcomer
        .post(b, path::MEM_BOR_FIN, &MemBorFin { lease: scene.lease.lease, generation: 0 })
        .unwrap_err();
    assert_eq!(error.to_string(), "d is not a peer of b");
    newcomer.open(b, scene.lease.lease).unwrap_err();
    scene.goes_on(pid);
}

#[test]
fn a_peer_cannot_give_orders() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let peer = Identity::load(&scene.cluster["c"].tls());
    let orders =
        [peer.get(b, path::STATUS), peer.post(b, path::BORROW, &serde_json::json!({"bytes": 1}))];
    for order in orders.into_iter().chain([peer.post(b, path::RETURN, &serde_json::json!({}))]) {
        let error = order.unwrap_err();
        assert!(error.to_string().contains("only this host may call"), "{error}");
    }
    for (path, body) in [
        (path::MEM_BOR_REQ, serde_json::json!({"bytes": "many"})),
        (path::RENEW, serde_json::json!({"leases": ["../../etc/passwd"]})),
        ("/v1/format_disk", serde_json::json!({})),
    ] {
        let error = peer.post(b, path, &body).unwrap_err();
        assert!(
            matches!(error, CallError::Refused { .. }) && error.to_string().contains(path),
            "{error}"
        );
    }
    scene.goes_on(pid);
}

#[test]
fn callers_that_say_nothing_are_hung_up_on_and_keep_nobody_out() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let b = scene.lender();
    let pid = b.status().agent.pid;
    let [borrower, other] = ["a", "c"].map(|name| Identity::load(&scene.cluster[name].tls()));
    for port in [b.api(), b.pages()] {
        let mut silent: Vec<_> = (0..300).map(|_| connect(port)).collect();
        // Each call fails by itself if the silent connections keep it out.
        if port == b.api() {
            other.get(b, path::OFFER).unwrap();
        } else {
            borrower.open(b, scene.lease.lease).unwrap();
        }
        // The first connection has been silent for the longest time.
        let mut first = silent.swap_remove(0);
        first.set_read_timeout(Some(2 * STEP_TIMEOUT)).unwrap();
        let heard = until_closed(&mut first);
        assert!(heard.len() <= 18, "the server sent more than the greeting: {heard:?}");
    }
    scene.goes_on(pid);
}
