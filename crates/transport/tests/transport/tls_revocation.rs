//! Tests of certificates that end early, on open connections and in handshakes.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use aquifer_transport::channel::{Channel as _, Socket};
use aquifer_transport::tls::{self, Identity, TlsError, TlsStream};

use crate::certificates::{Cluster, host};

const TIMEOUT: Duration = Duration::from_secs(20);

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
    let revoked = cluster.authority().revoke(&host("borrower"), SystemTime::now()).unwrap();
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
    let revoked = cluster.authority().revoke(&host("lender"), until).unwrap();
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
