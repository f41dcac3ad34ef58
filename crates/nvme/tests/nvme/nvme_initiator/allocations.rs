//! Absence of allocations in a connected initiator.

use std::sync::Arc;

use aquifer_nvme::initiator::{Connection, Operation, Target};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::Address;

use crate::alone::alone;
use crate::common::{TIMEOUT, pattern};
use crate::counting::allocations;
use crate::nvme_target::harness::Served;

fn use_it(connection: &mut Connection, pages: &mut [u8], long: &mut [u8]) {
    connection.write(0, &pages[..PAGE_SIZE]).unwrap();
    connection.read(0, &mut pages[..PAGE_SIZE]).unwrap();
    connection.write(1 << 20, long).unwrap();
    connection.read(1 << 20, long).unwrap();
    connection.write_zeroes(0, 1 << 20).unwrap();
    connection.trim(1 << 20, 1 << 20).unwrap();
    connection.flush().unwrap();
    let places = || (0..).step_by(PAGE_SIZE);
    let mut operations = [const { Operation::Flush }; 64];
    for (place, (from, offset)) in operations.iter_mut().zip(pages.chunks(PAGE_SIZE).zip(places()))
    {
        *place = Operation::Write { offset, from };
    }
    connection.run(&mut operations).unwrap();
    let mut operations = [const { Operation::Flush }; 64];
    for (place, (into, offset)) in
        operations.iter_mut().zip(pages.chunks_mut(PAGE_SIZE).zip(places()))
    {
        *place = Operation::Read { offset, into };
    }
    connection.run(&mut operations).unwrap();
}

#[test]
fn operations_allocate_nothing() {
    alone("nvme_initiator::allocations::operations_allocate_nothing", || {
        let served = Served::new(Bytes::mib(8));
        let host = crate::nvme_target::host::HOST.parse().unwrap();
        let plain = Target::new(Address::Unix(served.socket()), served.subsystem.clone(), host);
        let with_digests = Target { header_digest: true, data_digest: true, ..plain.clone() };
        for target in [plain, with_digests] {
            let mut connection = Connection::connect(Arc::new(target), TIMEOUT).unwrap();
            let (mut pages, mut long) = (pattern(64 * PAGE_SIZE, 1), pattern(3 << 20, 2));
            // The first round is not measured: threads allocate when they start.
            use_it(&mut connection, &mut pages, &mut long);
            let before = allocations();
            for _ in 0..20 {
                use_it(&mut connection, &mut pages, &mut long);
            }
            assert_eq!(allocations() - before, 0);
            assert!(pages == pattern(64 * PAGE_SIZE, 1) && long == pattern(3 << 20, 2));
        }
    });
}
