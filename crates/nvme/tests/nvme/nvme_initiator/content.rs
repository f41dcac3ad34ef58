//! Equality of written and read data, byte by byte.

use std::sync::Arc;

use aquifer_nvme::initiator::{Connection, Failure, Operation, Target};
use aquifer_nvme::target::Limits;
use aquifer_page::{Bytes, PAGE_SIZE};

use super::{connect, read, target};
use crate::common::{TIMEOUT, pattern};
use crate::in_flight;
use crate::nvme_target::harness::Served;

const MIB: usize = 1 << 20;
const PAGE: u64 = PAGE_SIZE as u64;

/// Runs every operation once, and many at a time, over a namespace of 64 MiB of zeroes.
fn every_operation(served: &Served, connection: &mut Connection) {
    assert_eq!((connection.size(), connection.block()), (Bytes::mib(64), Bytes(PAGE)));
    assert!(connection.was_empty() && !connection.is_read_only() && !connection.can_flush());
    assert!(read(connection, PAGE, 10 * PAGE_SIZE) == vec![0; 10 * PAGE_SIZE]);
    // From lengths that fit a capsule to lengths that take many commands.
    for (seed, length) in [PAGE_SIZE, 15 * PAGE_SIZE, 64 << 10, 68 << 10, MIB, 9 * MIB + PAGE_SIZE]
        .into_iter()
        .enumerate()
    {
        let data = pattern(length, seed as u64);
        connection.write(3 * PAGE, &data).unwrap();
        assert!(read(connection, 3 * PAGE, length) == data, "{length} bytes");
        let mut stored = vec![0; length];
        served.lease.read(3 * PAGE, &mut stored).unwrap();
        assert!(stored == data, "{length} bytes");
    }
    let left = pattern(9 * MIB + PAGE_SIZE, 5);
    connection.write_zeroes(3 * PAGE, 2 << 20).unwrap();
    connection.trim(3 * PAGE + (2 << 20), 1 << 20).unwrap();
    connection.flush().unwrap();
    assert!(read(connection, 3 * PAGE, 3 * MIB) == vec![0; 3 * MIB]);
    assert!(read(connection, 3 * PAGE + (3 << 20), left.len() - 3 * MIB) == left[3 * MIB..]);
    assert_eq!(served.lease.stored(), Bytes((left.len() - 3 * MIB) as u64));
    many_in_flight(connection);
    connection.write_zeroes(0, 64 << 20).unwrap();
    assert_eq!(served.lease.stored(), Bytes::ZERO);
}

fn many_in_flight(connection: &mut Connection) {
    let base = 16 << 20;
    in_flight::many_in_flight(base, |operations| connection.run(operations).unwrap());
    let long = pattern(64 * (100 << 10), 3);
    let mut writes: Vec<_> = long
        .chunks(100 << 10)
        .zip((base..).step_by(100 << 10))
        .map(|(from, offset)| Operation::Write { offset, from })
        .collect();
    connection.run(&mut writes).unwrap();
    assert!(read(connection, base, long.len()) == long);
    let mut mixed = [1, 2, 3].map(|_| vec![0; PAGE_SIZE]);
    let [a, b, c] = &mut mixed;
    let page = pattern(PAGE_SIZE, 9);
    connection
        .run(&mut [
            Operation::Read { offset: base, into: a },
            Operation::Write { offset: 40 << 20, from: &page },
            Operation::Read { offset: 40 << 20, into: b },
            Operation::Trim { offset: 42 << 20, length: 4096 },
            Operation::Write { offset: 41 << 20, from: &page },
            Operation::WriteZeroes { offset: 43 << 20, length: 8192 },
            Operation::Read { offset: 41 << 20, into: c },
        ])
        .unwrap();
    assert!(mixed[0] == long[..PAGE_SIZE] && mixed[1] == page && mixed[2] == page);
}

#[test]
fn every_operation_works() {
    let served = Served::new(Bytes::mib(64));
    every_operation(&served, &mut connect(&served));
}

#[test]
fn every_operation_works_with_digests() {
    for (header_digest, data_digest) in [(true, false), (false, true), (true, true)] {
        let served = Served::new(Bytes::mib(64));
        let target = Target { header_digest, data_digest, ..target(&served) };
        every_operation(&served, &mut Connection::connect(Arc::new(target), TIMEOUT).unwrap());
    }
}

#[test]
fn requests_that_do_not_fit_are_refused_before_they_are_sent() {
    let served = Served::new(Bytes::mib(4));
    let mut connection = connect(&served);
    let mut page = [0; PAGE_SIZE];
    let error = connection.read(4 << 20, &mut page).unwrap_err();
    assert!(
        matches!(error.failure, Failure::OutOfRange { .. }) && !error.ends_connection(),
        "{error}"
    );
    let error = connection.read(512, &mut page).unwrap_err();
    assert!(matches!(error.failure, Failure::Unaligned { block: 4096, .. }), "{error}");
    let error = connection.write(0, &page[..100]).unwrap_err();
    assert!(
        matches!(error.failure, Failure::Unaligned { .. }) && !error.ends_connection(),
        "{error}"
    );
    let mut long = vec![0; 2 << 20];
    let error = connection.run(&mut [Operation::Read { offset: 0, into: &mut long }]).unwrap_err();
    assert!(
        matches!(error.failure, Failure::TooLong { .. }) && !error.ends_connection(),
        "{error}"
    );
    let mut runs = Vec::new();
    let error = connection
        .run(&mut [Operation::BlockStatus { offset: 0, length: 4096, runs: &mut runs }])
        .unwrap_err();
    assert!(
        matches!(error.failure, Failure::Unsupported(_)) && !error.ends_connection(),
        "{error}"
    );
    connection.write(0, &pattern(PAGE_SIZE, 1)).unwrap();
    assert!(read(&mut connection, 0, PAGE_SIZE) == pattern(PAGE_SIZE, 1));
}

#[test]
fn a_full_lease_says_so_and_goes_on() {
    let served = Served::with(Bytes::mib(8), Bytes::mib(4), Limits::default());
    let mut connection = connect(&served);
    // With data in the capsule, and with data requested by R2T.
    for length in [PAGE_SIZE, 128 << 10] {
        let data = pattern(length, 4);
        let fill = |at: u64, connection: &mut Connection| connection.write(at, &data);
        let full = (0..8 << 20)
            .step_by(length)
            .find_map(|at| fill(at, &mut connection).err())
            .expect("more than its quota was stored");
        assert!(full.is_no_space() && !full.ends_connection(), "{full}");
        connection.write_zeroes(0, 8 << 20).unwrap();
        fill(4 << 20, &mut connection).unwrap();
        connection.write_zeroes(0, 8 << 20).unwrap();
    }
}

#[test]
fn a_namespace_that_shrinks_says_where_it_ends() {
    let served = Served::new(Bytes::mib(4));
    let mut connection = connect(&served);
    served.namespace.resize(Bytes::mib(2)).unwrap();
    let error = connection.read(3 << 20, &mut [0; PAGE_SIZE]).unwrap_err();
    assert!(error.to_string().contains("lba out of range") && !error.ends_connection(), "{error}");
    assert!(read(&mut connection, 0, PAGE_SIZE) == vec![0; PAGE_SIZE]);
}
