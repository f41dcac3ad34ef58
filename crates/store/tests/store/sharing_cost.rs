//! A test of the total memory cost of large leases that share pages.

use std::sync::Arc;

use aquifer_page::Bytes;
use aquifer_store::{Lease, Store};

use crate::alone::alone;
use crate::common::{Random, frames_taken, own_memory, shared_record, shm_dir};

const MIB: usize = 1 << 20;
/// MiB that the test writes to each lease.
const WRITTEN: usize = 512;

/// Writes every other MiB of the lease, so that it needs the tables for its whole capacity.
///
/// All pages of a lease differ, but every lease gets the same ones.
fn fill(lease: &Lease) {
    let mut block = vec![0; MIB];
    for at in 0..WRITTEN {
        Random(at as u64).fill(&mut block);
        lease.write((2 * at * MIB) as u64, &block).unwrap();
    }
}

#[test]
fn a_sharing_lease_costs_two_percent_and_its_equal_nothing() {
    alone("sharing_cost::a_sharing_lease_costs_two_percent_and_its_equal_nothing", || {
        let dir = shm_dir();
        let store = Store::open(dir.path()).unwrap();
        let before = own_memory();
        let leases: [Arc<Lease>; 3] =
            std::array::from_fn(|_| store.create(shared_record("tenant", Bytes::gib(1))).unwrap());
        let written = Bytes::mib(WRITTEN as u64);
        let cost = || own_memory().saturating_sub(before);

        fill(&leases[0]);
        assert!(cost() < written.scaled(1.02) + Bytes::mib(2), "{}", cost());
        let one = cost();
        leases[1..].iter().for_each(|lease| fill(lease));
        assert!(cost() < one + written.scaled(0.01), "{} after {one}", cost());
        assert_eq!(store.usage().stored, Bytes(3 * written.0));
        assert!(frames_taken(dir.path(), "tenant") <= written + Bytes::mib(2));

        // Reading a hole must not allocate a frame.
        let taken = frames_taken(dir.path(), "tenant");
        let mut bytes = vec![0; MIB];
        for at in 0..2 * WRITTEN {
            leases[1].read((at * MIB) as u64, &mut bytes).unwrap();
        }
        assert_eq!(frames_taken(dir.path(), "tenant"), taken);

        for lease in &leases {
            lease.discard(0, 1 << 30).unwrap();
        }
        assert_eq!(store.usage().stored, Bytes::ZERO);
        store.audit().unwrap();
        assert!(cost() < Bytes::mib(24), "{} not given back", cost());
        for lease in leases {
            store.remove(lease.id()).unwrap();
        }
        assert!(cost() < Bytes::mib(8), "{} not given back", cost());
    });
}
