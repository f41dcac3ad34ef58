//! Every operation of a connection, over an export of 256 MiB of zeroes.

// Each test uses only a part of this module.
#![allow(dead_code, clippy::unwrap_used)]

use aquifer_fabric::nbd::client::{Connection, Operation};

const MIB: usize = 1 << 20;

pub fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 7 + (at >> 8)) as u8 | 1).collect()
}

pub fn read(connection: &mut Connection, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0xee; len];
    connection.read(offset, &mut data).unwrap();
    data
}

/// Runs every operation once, whatever modes the handshake negotiated.
pub fn every_operation(connection: &mut Connection) {
    assert_eq!(connection.size().0, 256 * MIB as u64);
    assert!(read(connection, 5000, 10_000) == vec![0; 10_000]);
    // Longer than any server takes in one request.
    let large = pattern(40 * MIB, 1);
    connection.write(4096, &large).unwrap();
    assert!(read(connection, 4096, large.len()) == large);
    connection.write(1 << 20, b"small").unwrap();
    assert_eq!(read(connection, 1 << 20, 5), b"small");
    connection.trim(4096, 20 << 20).unwrap();
    connection.write_zeroes(4096 + (20 << 20), 10 << 20).unwrap();
    connection.flush().unwrap();
    assert!(read(connection, 4096, 30 * MIB) == vec![0; 30 * MIB]);
    assert!(read(connection, 4096 + (30 << 20), 10 * MIB) == large[30 * MIB..]);
    mixed(connection);
}

/// Runs many writes in one batch from `base` on, with gaps between them, then as many reads.
///
/// Returns the content of the first page.
pub fn many_in_flight(base: u64, mut run: impl FnMut(&mut [Operation<'_>])) -> Vec<u8> {
    let mut data = pattern(300 * 8192, 2);
    let places = || (base..).step_by(12_288);
    let pieces = data.chunks(8192).zip(places());
    let mut writes: Vec<_> =
        pieces.map(|(from, offset)| Operation::Write { offset, from }).collect();
    writes.push(Operation::Flush);
    writes.push(Operation::Write { offset: 0, from: &[] });
    run(&mut writes);
    let mut back = vec![0; data.len()];
    let pieces = back.chunks_mut(8192).zip(places());
    let mut reads: Vec<_> = pieces.map(|(into, offset)| Operation::Read { offset, into }).collect();
    run(&mut reads);
    assert!(back == data);
    data.truncate(4096);
    data
}

/// Runs reads and writes in one batch; expects the operations of each page to act in order.
fn mixed(connection: &mut Connection) {
    let base = 128 << 20;
    let first = many_in_flight(base, |operations| connection.run(operations).unwrap());
    let mut mixed = [1, 2, 3].map(|_| vec![0; 4096]);
    let [a, b, c] = &mut mixed;
    let page = pattern(4096, 9);
    connection
        .run(&mut [
            Operation::Read { offset: base, into: a },
            Operation::Write { offset: 200 << 20, from: &page },
            Operation::Read { offset: 200 << 20, into: b },
            Operation::Trim { offset: 202 << 20, length: 4096 },
            Operation::Write { offset: 201 << 20, from: &page },
            Operation::Read { offset: 201 << 20, into: c },
        ])
        .unwrap();
    assert!(mixed[0] == first && mixed[1] == page && mixed[2] == page);
}
