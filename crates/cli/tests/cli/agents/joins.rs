//! Tests of hosts that joined a running cluster and swap to each other's memory.

use std::fs;

use aquifer_api::status::Standing;
use aquifer_page::Bytes;

use super::framework::{Cluster, Spec, lacks_rights, wait_until};

#[test]
fn a_host_that_joins_lends_to_those_that_were_there() {
    if lacks_rights() {
        return;
    }
    // The signer has nothing to lend.
    let small = Spec::new("a").memory(Bytes::mib(48)).set("lend", "enabled", false);
    let mut cluster = Cluster::created(small).with_swap();
    cluster.join("b");
    let a = &cluster["a"];
    wait_until("a knows b", || {
        let peers = a.status().peers;
        peers.iter().any(|peer| peer.standing == Standing::Up && peer.spare > Some(Bytes::ZERO))
    });
    let borrowed = a.borrow(Bytes::mib(64));
    let mut load = a.load(Bytes::mib(80));
    load.filled();
    assert!(a.swapped() > Bytes::mib(16), "{}", a.swapped());
    assert_eq!(cluster["b"].lent().lease, borrowed.leases[0]);

    // The lender's agent is gone for a while, and nobody wrote down its address but the cluster.
    cluster["b"].kill_agent();
    wait_until("a knows that b is down", || {
        a.status().peers.iter().any(|peer| peer.standing == Standing::Down)
    });
    fs::remove_file(a.state().join("contacts.json")).unwrap();
    cluster["b"].restart();
    load.verify();
    load.free();
    a.give_back();
    wait_until("a and b are free", || a.is_free() && cluster["b"].is_free());
}
