//! Tests that the server admits hosts of the cluster by mutual TLS, and no other client.

use std::io::IoSlice;
use std::sync::Arc;

use aquifer_nbd::proto::{option, reply};
use aquifer_nbd::server::{Security, Server};
use aquifer_page::Bytes;
use aquifer_transport::Address;
use aquifer_transport::channel::Channel as _;

use super::harness::{Client, Served, info_payload, run, tool};
use crate::certificates::Cluster;
use crate::common::{Raw, pattern};

/// Serves the exports of `served` under TLS on another address.
fn secure(served: &Served, cluster: &Cluster, address: &str) -> Server {
    let security = Security::Tls(cluster.identity("lender").server());
    Server::bind(&address.parse().unwrap(), security, served.registry.clone()).unwrap()
}

#[test]
fn without_tls_a_client_gets_nothing_but_the_hint() {
    let (served, cluster) = (Served::new(Bytes::mib(1)), Cluster::new());
    let path = served.path("secure");
    let _server = secure(&served, &cluster, &format!("unix:{}", path.display()));
    let mut client = Client::greeted(&path);
    for (option, payload) in [
        (option::LIST, vec![]),
        (option::STRUCTURED_REPLY, vec![]),
        (option::GO, info_payload("")),
        (option::GO, vec![0; 100_000]),
        (99, vec![]),
    ] {
        client.option(option, &payload);
        assert_eq!(client.option_reply(option).0, reply::ERR_TLS_REQD);
    }
    client.option(option::EXPORT_NAME, b"");
    assert!(client.is_closed());
    assert!(served.registry.peers.lock().unwrap().is_empty(), "no export was even looked up");
}

#[test]
fn a_client_with_a_cluster_certificate_copies_both_ways() {
    let (served, cluster) = (Served::new(Bytes::mib(8)), Cluster::new());
    cluster.issue("reached-by-address", &["127.0.0.1".to_owned()]);
    let security = Security::Tls(cluster.identity("reached-by-address").server());
    let server =
        Server::bind(&"127.0.0.1:0".parse().unwrap(), security, served.registry.clone()).unwrap();
    let Address::Tcp { port, .. } = *server.address() else { panic!("not TCP") };

    // libnbd looks for the certificates under these names.
    let certificates = served.path("certificates");
    std::fs::create_dir(&certificates).unwrap();
    for (ours, theirs) in
        [("ca.pem", "ca-cert.pem"), ("host.pem", "client-cert.pem"), ("host.key", "client-key.pem")]
    {
        std::fs::copy(cluster.dir("borrower").join(ours), certificates.join(theirs)).unwrap();
    }
    let uri = format!("nbds://127.0.0.1:{port}/?tls-certificates={}", certificates.display());
    let (there, back) = (served.path("there"), served.path("back"));
    let data = pattern(8 << 20, 7);
    std::fs::write(&there, &data).unwrap();
    run(tool("nbdcopy").arg(&there).arg(&uri));
    run(tool("nbdcopy").arg(&uri).arg(&back));
    assert!(std::fs::read(&back).unwrap() == data);
    let peers = served.registry.peers.lock().unwrap();
    assert!(
        peers.iter().all(|peer| peer.host.as_ref().is_some_and(|host| host.as_str() == "borrower"))
    );
}

#[test]
fn a_stranger_gets_nothing() {
    let (served, cluster, other) = (Served::new(Bytes::mib(1)), Cluster::new(), Cluster::new());
    let path = served.path("secure");
    let _server = secure(&served, &cluster, &format!("unix:{}", path.display()));
    let host = crate::certificates::host("lender");
    for config in [
        cluster.config_without_certificate(),
        cluster.config_with_certificate_of(&other.dir("borrower")),
    ] {
        let mut client = Client::greeted(&path);
        client.option(option::STARTTLS, &[]);
        assert_eq!(client.option_reply(option::STARTTLS).0, reply::ACK);
        let socket = client.stream.into();
        let connected = aquifer_transport::tls::connect(
            socket,
            Arc::clone(&config),
            &host,
            crate::common::TIMEOUT,
        );
        // In TLS 1.3 the first receive tells the client that the server refused it.
        let refused = connected.map_or(true, |mut stream| {
            !matches!(aquifer_transport::channel::Channel::recv(&mut stream, &mut [0; 16]), Ok(1..))
        });
        assert!(refused);
    }
    assert!(served.registry.peers.lock().unwrap().is_empty());
}

#[test]
fn tls_starts_once_in_a_session() {
    let (served, cluster) = (Served::new(Bytes::mib(1)), Cluster::new());
    let path = served.path("secure");
    let _server = secure(&served, &cluster, &format!("unix:{}", path.display()));
    let mut client = Client::greeted(&path);
    client.option(option::STARTTLS, &[]);
    assert_eq!(client.option_reply(option::STARTTLS).0, reply::ACK);
    let config = cluster.identity("borrower").client_config();
    let host = crate::certificates::host("lender");
    let timeout = crate::common::TIMEOUT;
    let mut stream =
        aquifer_transport::tls::connect(client.stream.into(), config, &host, timeout).unwrap();
    let again = [&b"IHAVEOPT"[..], &option::STARTTLS.to_be_bytes(), &[0; 4]].concat();
    stream.send_all(&mut [IoSlice::new(&again)]).unwrap();
    let (mut answer, mut at) = ([0; 20], 0);
    while at < answer.len() {
        at += stream.recv(&mut answer[at..]).unwrap();
    }
    assert_eq!(answer[8..12], option::STARTTLS.to_be_bytes());
    assert_eq!(answer[12..16], reply::ERR_INVALID.to_be_bytes());
}
