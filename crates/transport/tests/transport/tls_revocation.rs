//! Tests of certificates that end early, on open connections and in handshakes.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use aquifer_transport::channel::{Channel as _, Socket};
use aquifer_transport::tls::{self, Identity, TlsError, TlsStream};

use crate::certificates::{Cluster, host};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A time at which no certificate holds any more.
fn far() -> SystemTime {
    SystemTime::now() + 2 * tls::TEN_YEARS
}

/// Connects the borrower to the lender; returns the lender's end, and the borrower's.
fn connect(
    lender: &Identity,
    borrower: &Identity,
) -> (Result<TlsStream, TlsError>, Result<TlsStream, TlsError>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = lender.server();
    let accepting = thread::spawn(move || {
        let socket = Socket::from(listener.accept().unwrap().0);
        tls::accept(socket, server, TIMEOUT).map(|(stream, _)| stream)
    });
    let socket = Socket::from(TcpStream::connect(address).unwrap());
    let ours = tls::connect(socket, borrower.client(), &host("lender"), TIMEOUT);
    (accepting.join().unwrap(), ours)
}

/// Returns whether the connection ends before a timeout.
fn ends(stream: &mut TlsStream) -> bool {
    stream.set_deadline(Some(Instant::now() + TIMEOUT));
    stream.recv(&mut [0]).map_or_else(
        |error| {
            error.kind() != std::io::ErrorKind::TimedOut
                && error.kind() != std::io::ErrorKind::WouldBlock
        },
        |received| received == 0,
    )
}

#[test]
fn a_revocation_ends_connections_of_all_processes() {
    let cluster = Cluster::new();
    let (lender, borrower) = (cluster.identity("lender"), cluster.identity("borrower"));
    let (theirs, ours) = connect(&lender, &borrower);
    let (mut theirs, mut ours) = (theirs.unwrap(), ours.unwrap());
    // Another process of the lender's host records it.
    let beside = cluster.identity("lender");
    let revoked = cluster.authority().revoke(&host("borrower"), SystemTime::now(), far()).unwrap();
    let forged = tls::Revocation { host: host("lender"), ..revoked.clone() };
    assert!(!beside.revoke(vec![forged]).unwrap());
    assert!(beside.revoke(vec![revoked.clone()]).unwrap());
    assert!(!beside.revoke(vec![revoked]).unwrap(), "it is known");
    assert!(ends(&mut theirs) && ends(&mut ours));
    assert!(lender.revocations().until(&host("borrower")).is_some());

    let (theirs, _) = connect(&lender, &borrower);
    let error = theirs.unwrap_err().to_string();
    assert!(error.to_lowercase().contains("revoked"), "{error}");
    // The file is read by the next process.
    let (theirs, _) = connect(&cluster.identity("lender"), &borrower);
    theirs.unwrap_err();
}

#[test]
fn a_client_refuses_a_revoked_server_and_then_its_successor_not() {
    let cluster = Cluster::new();
    let (lender, borrower) = (cluster.identity("lender"), cluster.identity("borrower"));
    let until = SystemTime::now();
    let revoked = cluster.authority().revoke(&host("lender"), until, far()).unwrap();
    borrower.revoke(vec![revoked]).unwrap();
    let (_, ours) = connect(&lender, &borrower);
    let error = ours.unwrap_err().to_string();
    assert!(error.to_lowercase().contains("revoked"), "{error}");

    // A new machine has the name.
    let dir = cluster.dir("new");
    let request = tls::Request::prepare(&dir, &host("lender")).unwrap();
    let issued = until + Duration::from_secs(1);
    let signed = cluster.authority().sign(request.der(), &host("lender"), &[], issued).unwrap();
    let ca = cluster.authority().certificate().unwrap();
    request.keep(&host("lender"), &signed, &ca, tls::fingerprint(&ca).unwrap()).unwrap();
    let (theirs, ours) = connect(&Identity::load(&dir).unwrap(), &borrower);
    assert!(theirs.is_ok() && ours.is_ok());
}

#[test]
fn a_connection_outlives_its_identity_but_no_revocation() {
    let cluster = Cluster::new();
    // A stream of a VM that moves drops what it was made from.
    let (theirs, ours) = connect(&cluster.identity("lender"), &cluster.identity("borrower"));
    let (mut theirs, mut ours) = (theirs.unwrap(), ours.unwrap());
    let agent = cluster.identity("lender");
    let revoked = cluster.authority().revoke(&host("borrower"), SystemTime::now(), far()).unwrap();
    assert!(agent.revoke(vec![revoked]).unwrap());
    assert!(ends(&mut theirs) && ends(&mut ours));
}

#[test]
fn a_revocation_holds_although_no_file_can_be_written() {
    let cluster = Cluster::new();
    let (lender, borrower) = (cluster.identity("lender"), cluster.identity("borrower"));
    let (theirs, _ours) = connect(&lender, &borrower);
    let mut theirs = theirs.unwrap();
    let draft = cluster.dir("lender").join("revoked.json.new");
    std::fs::create_dir_all(draft.join("in the way")).unwrap();
    let revoked = cluster.authority().revoke(&host("borrower"), SystemTime::now(), far()).unwrap();
    let error = lender.revoke(vec![revoked.clone()]).unwrap_err().to_string();
    assert!(error.contains("revoked.json"), "{error}");
    assert!(ends(&mut theirs));
    connect(&lender, &borrower).0.unwrap_err();

    std::fs::remove_dir_all(draft).unwrap();
    assert!(!lender.revoke(vec![revoked]).unwrap(), "it is known");
    let after = cluster.identity("lender").revocations();
    assert!(after.until(&host("borrower")).is_some(), "and recorded now");
}

#[test]
fn a_damaged_file_hides_no_change_of_another() {
    let cluster = Cluster::new();
    let lender = cluster.identity("lender");
    let first = lender.validity();
    let (certificate, list) =
        (cluster.dir("lender").join("host.pem"), cluster.dir("lender").join("revoked.json"));
    let whole = std::fs::read(&certificate).unwrap();
    std::fs::write(&certificate, "damaged").unwrap();
    let revoked = cluster.authority().revoke(&host("borrower"), SystemTime::now(), far()).unwrap();
    let json = format!(
        r#"[{{"host":"borrower","until":{},"ends":{},"signature":"{}"}}]"#,
        revoked.until, revoked.ends, revoked.signature
    );
    std::fs::write(&list, json).unwrap();
    assert!(lender.revocations().until(&host("borrower")).is_some());
    assert_eq!(lender.validity(), first);

    // And the other way round: neither takes back what is known.
    std::fs::write(&list, "damaged").unwrap();
    std::fs::write(&certificate, whole).unwrap();
    assert_eq!(lender.validity(), first);
    std::fs::remove_file(&list).unwrap();
    assert!(lender.revocations().until(&host("borrower")).is_some());
    Identity::load(&cluster.dir("lender")).unwrap();
}

#[test]
fn a_certificate_of_the_future_passes_only_to_be_renewed() {
    let cluster = Cluster::new();
    let dir = cluster.dir("early");
    let request = tls::Request::prepare(&dir, &host("borrower")).unwrap();
    let issued = SystemTime::now() + Duration::from_secs(40 * 24 * 3600);
    let signed = cluster.authority().sign(request.der(), &host("borrower"), &[], issued).unwrap();
    let ca = cluster.authority().certificate().unwrap();
    request.keep(&host("borrower"), &signed, &ca, tls::fingerprint(&ca).unwrap()).unwrap();
    let (lender, early) = (cluster.identity("lender"), Identity::load(&dir).unwrap());
    let error = connect(&lender, &early).0.unwrap_err().to_string();
    assert!(error.to_lowercase().contains("not valid yet"), "{error}");
    let accepted = |server: tls::Server| {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = thread::spawn(move || {
            let socket = Socket::from(listener.accept().unwrap().0);
            tls::accept(socket, server, TIMEOUT).map(|(_, host)| host)
        });
        let socket = Socket::from(TcpStream::connect(address).unwrap());
        let _ours = tls::connect(socket, early.client(), &host("lender"), TIMEOUT);
        accepting.join().unwrap()
    };
    assert_eq!(accepted(lender.admitting_config().into()).unwrap(), host("borrower"));
    let until = issued + Duration::from_secs(1);
    let revoked = cluster.authority().revoke(&host("borrower"), until, far()).unwrap();
    lender.revoke(vec![revoked]).unwrap();
    let error = accepted(lender.admitting_config().into()).unwrap_err().to_string();
    assert!(error.to_lowercase().contains("revoked"), "{error}");
}
