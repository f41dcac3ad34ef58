//! Tests of the start and the end of a server.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use aquifer_nbd::server::{Security, Server};
use aquifer_page::Bytes;
use aquifer_transport::Address;

use super::harness::{Served, tool};
use crate::common::{Raw, wait_until};

#[test]
fn a_dropped_server_ends_its_connections_and_its_socket() {
    let Served { server, registry, store, lease, dir } = Served::new(Bytes::mib(1));
    let served = Served { server, registry: Arc::clone(&registry), store, lease, dir };
    let mode = std::fs::metadata(served.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others cannot connect");
    let mut client = served.client(true);
    let socket = served.socket();
    served.server.shutdown();
    assert_eq!(registry.connections(), 0);
    assert!(client.is_closed());
    assert!(!socket.exists());
}

#[test]
fn the_connections_of_one_lease_can_be_ended() {
    let served = Served::new(Bytes::mib(1));
    served.add("other", Bytes::mib(1));
    let mut mine = served.client(false);
    let mut others = super::harness::Client::greeted(&served.socket());
    others.go("other");
    wait_until("both are connected", || served.connections() == 2);
    served.registry.leases.lock().unwrap().remove("");
    served.server.close_lease(served.lease.id());
    assert_eq!(served.connections(), 1);
    assert!(mine.is_closed());
    others.write(0, b"going on");
    assert_eq!(served.store.remove(served.lease.id()).unwrap(), Bytes::ZERO);
}

#[test]
fn a_socket_left_behind_is_replaced_and_one_in_use_is_not() {
    let served = Served::new(Bytes::mib(1));
    let again = Server::bind(served.server.address(), Security::Plain, served.registry.clone())
        .unwrap_err();
    assert!(again.to_string().contains(served.socket().to_str().unwrap()), "{again}");
    served.assert_serves();

    let left = served.path("left");
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    let server =
        Server::bind(&Address::Unix(left.clone()), Security::Plain, served.registry.clone())
            .unwrap();
    drop(server);
    assert!(!left.exists());

    std::fs::write(&left, "not a socket").unwrap();
    assert!(
        Server::bind(&Address::Unix(left.clone()), Security::Plain, served.registry.clone())
            .is_err()
    );
    assert!(left.exists());
}

#[test]
fn tcp_works_as_well_on_a_port_of_the_kernels_choice() {
    let served = Served::new(Bytes::mib(1));
    let server =
        Server::bind(&"127.0.0.1:0".parse().unwrap(), Security::Plain, served.registry.clone())
            .unwrap();
    let Address::Tcp { port, .. } = *server.address() else { panic!("not TCP") };
    assert_ne!(port, 0);
    let size = super::harness::run(&mut tool(&format!("nbdinfo --size nbd://127.0.0.1:{port}/")));
    assert_eq!(size.trim(), "1048576");
    assert!(
        served.registry.peers.lock().unwrap().iter().all(|peer| peer.local && peer.host.is_none())
    );
}
