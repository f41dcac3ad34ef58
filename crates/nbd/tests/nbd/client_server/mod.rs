//! Tests of our initiator with our server, in plain text and under TLS.

mod crowds;
mod trickling;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_nbd::client::{Connection, Failure, Run, Target};
use aquifer_nbd::server::{Limits, Security, Server};
use aquifer_page::{Bytes, HostName, PAGE_SIZE};
use aquifer_store::{Lease, Store};
use aquifer_transport::Address;
use aquifer_transport::tls::Identity;

use crate::certificates::{Cluster, host};
use crate::exports::ExportRegistry;
use crate::operations::{every_operation, pattern};
use crate::stores::{record, temporary_store};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A lender with a lease of 256 MiB for `borrower`, with a quota of half of that.
struct NbdLender {
    server: Server,
    registry: Arc<ExportRegistry>,
    lease: Arc<Lease>,
    _store: Store,
    _dir: tempfile::TempDir,
}

impl NbdLender {
    fn start(address: impl FnOnce(&Path) -> Address, identity: Option<&Identity>) -> Self {
        Self::with(address, identity, Limits::default())
    }

    fn with(
        address: impl FnOnce(&Path) -> Address,
        identity: Option<&Identity>,
        limits: Limits,
    ) -> Self {
        let (dir, store) = temporary_store();
        let lease = store.create(record(Bytes::mib(256), Bytes::mib(128))).unwrap();
        let registry = ExportRegistry::with("pages", &lease);
        let security =
            identity.map_or(Security::Plain, |identity| Security::Tls(identity.server()));
        let server =
            Server::bind_with(&address(dir.path()), security, registry.clone(), limits).unwrap();
        Self { server, registry, lease, _store: store, _dir: dir }
    }

    fn target(&self, tls: Option<(&Identity, HostName)>) -> Arc<Target> {
        let tls = tls.map(|(identity, lender)| (identity.client(), lender));
        Arc::new(Target { address: self.server.address().clone(), export: "pages".into(), tls })
    }
}

fn unix(dir: &Path) -> Address {
    Address::Unix(dir.join("nbd"))
}

fn tcp(_: &Path) -> Address {
    "127.0.0.1:0".parse().unwrap()
}

#[test]
fn every_operation_works_in_the_clear() {
    let lender = NbdLender::start(unix, None);
    every_operation(&mut Connection::connect(lender.target(None), TIMEOUT).unwrap());
}

#[test]
fn every_operation_works_under_tls_over_tcp() {
    let cluster = Cluster::new();
    let lender = NbdLender::start(tcp, Some(&cluster.identity("lender")));
    let borrower = cluster.identity("borrower");
    let target = lender.target(Some((&borrower, host("lender"))));
    every_operation(&mut Connection::connect(target, TIMEOUT).unwrap());
}

#[test]
fn zeroes_take_no_room_and_are_holes() {
    let lender = NbdLender::start(unix, None);
    let mut connection = Connection::connect(lender.target(None), TIMEOUT).unwrap();
    connection.write(0, &vec![0; 1 << 20]).unwrap();
    connection.write(1 << 20, &pattern(PAGE_SIZE, 1)).unwrap();
    let mut runs = Vec::new();
    connection.block_status(0, 256 << 20, &mut runs).unwrap();
    let expected = [(1 << 20, true), (4096, false), ((255 << 20) - 4096, true)];
    assert_eq!(runs, expected.map(|(length, hole)| Run { length, hole }));
    assert_eq!(lender.lease.stored(), Bytes(PAGE_SIZE as u64));
    connection.write_zeroes(0, 256 << 20).unwrap();
    assert_eq!(lender.lease.stored(), Bytes::ZERO);
}

#[test]
fn a_full_lease_says_so_and_goes_on() {
    let lender = NbdLender::start(unix, None);
    let mut connection = Connection::connect(lender.target(None), TIMEOUT).unwrap();
    let data = pattern(1 << 20, 2);
    for at in 0..128 {
        connection.write(at << 20, &data).unwrap();
    }
    let error = connection.write(128 << 20, &data).unwrap_err();
    assert!(error.is_no_space() && !error.ends_connection(), "{error}");
    connection.write_zeroes(0, 1 << 20).unwrap();
    connection.write(128 << 20, &data).unwrap();
}

#[test]
fn a_lease_is_for_its_borrower_only() {
    let cluster = Cluster::new();
    cluster.issue("other", &[]);
    let lender = NbdLender::start(tcp, Some(&cluster.identity("lender")));
    let other = cluster.identity("other");
    let target = lender.target(Some((&other, host("lender"))));
    let error = Connection::connect(target, TIMEOUT).unwrap_err();
    assert!(matches!(error.failure, Failure::Refused(_)), "{error}");
    assert!(error.to_string().contains("not lent to other"), "{error}");

    let borrower = cluster.identity("borrower");
    let elsewhere = lender.target(Some((&borrower, host("other"))));
    let error = Connection::connect(elsewhere, TIMEOUT).unwrap_err();
    assert!(matches!(error.failure, Failure::Tls(_)), "{error}");
    assert_eq!(lender.registry.connected(), 0);
}

#[test]
fn a_server_that_shuts_down_is_a_lost_connection() {
    let lender = NbdLender::start(unix, None);
    let target = lender.target(None);
    let mut connection = Connection::connect(target.clone(), TIMEOUT).unwrap();
    connection.flush().unwrap();
    lender.server.shutdown();
    assert!(connection.flush().unwrap_err().ends_connection());
    let error = Connection::connect(target, TIMEOUT).unwrap_err();
    assert!(matches!(error.failure, Failure::Connect(_)), "{error}");
}
