//! A test of the total memory cost of a large lease.

use aquifer_page::Bytes;

use crate::alone::alone;
use crate::common::{one_lease, own_memory, taken};

const MIB: usize = 1 << 20;

#[test]
fn a_lease_of_two_gib_costs_at_most_two_percent_extra() {
    alone("cost::a_lease_of_two_gib_costs_at_most_two_percent_extra", || {
        let before = own_memory();
        let (dir, _store, lease) = one_lease(Bytes::gib(2));
        let block = vec![7; MIB];
        // Every other MiB, so that the lease needs the tables for its whole capacity.
        for at in (0..2048).step_by(2) {
            lease.write(at * MIB as u64, &block).unwrap();
        }
        assert_eq!(lease.stored(), Bytes::gib(1));
        assert_eq!(taken(dir.path(), &lease), 1 << 30);
        let cost = own_memory() - before;
        assert!(cost < Bytes::gib(1).scaled(1.02), "{cost}");

        // Reading a hole must not allocate a page.
        let mut bytes = vec![0; MIB];
        for at in 0..2048 {
            lease.read(at * MIB as u64, &mut bytes).unwrap();
        }
        assert_eq!(taken(dir.path(), &lease), 1 << 30);

        lease.discard(0, 2 << 30).unwrap();
        assert_eq!((lease.stored(), taken(dir.path(), &lease)), (Bytes::ZERO, 0));
        let left = own_memory().saturating_sub(before);
        assert!(left < Bytes::mib(16), "{left} not given back");
    });
}
