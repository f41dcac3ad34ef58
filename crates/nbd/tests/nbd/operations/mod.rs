//! Every operation of a connection, over an export of 256 MiB of zeroes.

// Each test uses only a part of this module.
#![allow(dead_code, clippy::unwrap_used)]

mod in_flight;

use aquifer_nbd::client::{Connection, Operation};

use in_flight::many_in_flight;
pub use in_flight::pattern;

const MIB: usize = 1 << 20;

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
