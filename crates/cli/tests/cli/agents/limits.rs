//! Tests of a lender's limits, with two borrowers that speak for themselves.

use std::thread;

use aquifer_api::path;
use aquifer_api::status::{LeaseTraffic, Lent};
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};

use super::framework::{Answer, Cluster, Host, Identity, Spec, lacks_rights, wait_until};

/// A lender with limits for each lease, and a lease of each borrower.
struct Scene {
    cluster: Cluster,
    leases: [LeaseId; 2],
}

/// The requests that the lender takes at once: a tenth of its limit of 256 a second.
const BURST: u64 = 25;

impl Scene {
    fn set() -> Self {
        let limits = toml::toml! {
            lease_requests = 256
            lease_connections = 8
        };
        let lender = Spec::new("a").memory(Bytes::mib(512)).set("lend", "limits", limits);
        let cluster = Cluster::admitted([lender, Spec::new("b"), Spec::new("c")]);
        cluster["a"].start();
        cluster["a"].wait_until_ready();
        let leases = ["b", "c"].map(|host| {
            let request = serde_json::json!({
                "request": "0".repeat(31) + "1", "bytes": "64M", "group": "default",
            });
            let borrower = Identity::load(&cluster[host].tls());
            borrower.post(&cluster["a"], path::MEM_BOR_REQ, &request).unwrap();
            let is_its = |lent: &Lent| lent.borrower.as_str() == host;
            wait_until("the lender to grant a lease", || {
                cluster["a"].status().loans.lent.iter().any(is_its)
            });
            cluster["a"].status().loans.lent.into_iter().find(is_its).unwrap().lease
        });
        Self { cluster, leases }
    }

    fn lender(&self) -> &Host {
        &self.cluster["a"]
    }

    fn traffic(&self, lease: LeaseId) -> Option<LeaseTraffic> {
        let lent = self.lender().status().loans.lent;
        lent.into_iter().find(|lent| lent.lease == lease).unwrap().traffic
    }
}

/// Reads a page at a time, as one connection of a borrower.
fn read(scene: &Scene, host: &str, lease: LeaseId, pages: u64) {
    let borrower = Identity::load(&scene.cluster[host].tls());
    let mut connection = borrower.open(scene.lender(), lease).unwrap();
    let mut page = [1; PAGE_SIZE];
    for index in 0..pages {
        connection.read(index % 16 * PAGE_SIZE as u64, &mut page).unwrap();
        assert!(page == [0; PAGE_SIZE]);
    }
}

#[test]
fn a_greedy_borrower_waits_and_a_modest_one_does_not() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let [greedy, modest] = scene.leases;
    thread::scope(|scope| {
        // More than the rate gives in two seconds.
        scope.spawn(|| read(&scene, "b", greedy, 600));
        wait_until("the greedy borrower to wait", || {
            scene.traffic(greedy).is_some_and(|traffic| traffic.waiting > 0)
        });
        read(&scene, "c", modest, BURST);
    });
    // The lender adds up what it sent after it has sent it.
    let pages = |lease| scene.traffic(lease).unwrap().read.pages();
    wait_until("the lender to have counted all pages", || {
        pages(modest) == BURST && pages(greedy) == 600
    });
    let traffic = scene.traffic(modest).unwrap();
    assert_eq!(traffic.written, Bytes::ZERO);
    assert_eq!((traffic.waited_s, traffic.limit), (0.0, None));
    let traffic = scene.traffic(greedy).unwrap();
    assert_eq!(traffic.waiting, 0);
    assert_eq!(traffic.limit.as_deref(), Some("lease_requests"));
    assert!(traffic.waited_s > 1.0, "{traffic:?}");

    let words = ["why", &greedy.to_string()];
    wait_until("the lender to explain", || {
        let why = Answer::of(&mut scene.lender().aquifer(&words)).stdout;
        why.contains("holds back host b") && why.contains("by lease_requests")
    });
    let status = Answer::of(&mut scene.lender().aquifer(&["status"])).stdout;
    assert!(status.contains("by lease_requests") && status.contains("borrowers share"), "{status}");
    let link = scene.lender().status().loans.lending_link.unwrap();
    assert_eq!((link.interface, link.rate, link.share), (None, None, 0.8));
}

#[test]
fn a_connection_over_the_limit_of_a_lease_is_told_why() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::set();
    let [lease, other] = scene.leases;
    let [b, c] = ["b", "c"].map(|host| Identity::load(&scene.cluster[host].tls()));
    let open: Vec<_> = (0..8).map(|_| b.open(scene.lender(), lease).unwrap()).collect();
    let refused = b.open(scene.lender(), lease).unwrap_err().to_string();
    let reason = format!("lease {lease} has 8 connections, the lender's limit for a lease");
    assert!(refused.contains(&reason), "{refused}");
    c.open(scene.lender(), other).unwrap();
    drop(open);
    wait_until("the lender to have room", || b.open(scene.lender(), lease).is_ok());
}
