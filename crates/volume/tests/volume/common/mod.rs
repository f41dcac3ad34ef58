//! Lenders for the tests' volumes, and content that depends on its offset.

// Each test program uses only a part of this file.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

#[path = "../../../../transport/tests/transport/certificates/mod.rs"]
pub mod certificates;
#[path = "../../../../store/tests/store/example/mod.rs"]
pub mod example;
#[path = "../../../../nbd/tests/nbd/freezing/mod.rs"]
mod freezing;
#[path = "../../../../nbd/tests/nbd/nbdkit/mod.rs"]
pub mod nbdkit;
pub mod ours;
#[path = "../../../../store/tests/store/random/mod.rs"]
mod random;
#[path = "../../../../hosts/src/wait.rs"]
mod wait;

use std::time::Duration;

use aquifer_nbd::client::{Connection, Target};
use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, VolumeId, WorkerId};
use aquifer_transport::Address;
use aquifer_volume::{LeaseTarget, Protocol, Volume, VolumeConfig};
pub use certificates::Cluster;
pub use nbdkit::Nbdkit;
pub use ours::{Kind, OurLender};
pub use random::Random;
pub use wait::wait_until;

pub const PAGE: u64 = PAGE_SIZE as u64;
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the configuration of a volume with this many extents, for four threads.
pub fn config(extents: u64) -> VolumeConfig {
    VolumeConfig {
        id: VolumeId::random(),
        capacity: Bytes(extents * EXTENT_SIZE),
        workers: 4,
        io_timeout: TIMEOUT,
        tls: None,
        spill: None,
        ledger: None,
    }
}

/// Starts a lender with this many extents: nbdkit without TLS.
pub fn lender(extents: u64) -> Nbdkit {
    Nbdkit::start(&["memory", &format!("{}M", extents * 64)])
}

/// Makes a lease on all of the lender's memory. Ids rise with `number`.
pub fn lease(server: &Nbdkit, number: u128, extents: u64) -> LeaseTarget {
    lease_at(server.address(), number, extents)
}

pub fn lease_at(address: Address, number: u128, extents: u64) -> LeaseTarget {
    LeaseTarget {
        lease: LeaseId(number),
        lender: format!("lender-{number}").parse().unwrap(),
        address,
        protocol: Protocol::Nbd { export: String::new(), secure: false },
        capacity: Bytes(extents * EXTENT_SIZE),
        encryption: None,
        claim: None,
    }
}

/// Makes the same lease, over TLS from `lender`.
pub fn secure(target: LeaseTarget, lender: &str) -> LeaseTarget {
    let protocol = Protocol::Nbd { export: String::new(), secure: true };
    LeaseTarget { lender: lender.parse().unwrap(), protocol, ..target }
}

/// Makes a volume over one lender for each size in extents. The leases have the ids 1, 2, …
pub fn volume(config: VolumeConfig, sizes: &[u64]) -> (Volume, Vec<Nbdkit>) {
    let volume = Volume::new(config).unwrap();
    let lenders: Vec<_> = sizes.iter().map(|extents| lender(*extents)).collect();
    for (at, (server, extents)) in lenders.iter().zip(sizes).enumerate() {
        volume.add_lease(lease(server, at as u128 + 1, *extents)).unwrap();
    }
    (volume, lenders)
}

/// Returns the content of a page at this offset after its `round`th write; never zeroes.
pub fn content(offset: u64, round: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (at, word) in page.chunks_exact_mut(8).enumerate() {
        let value =
            (offset + at as u64 * 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (round << 1 | 1);
        word.copy_from_slice(&value.to_le_bytes());
    }
    page
}

pub fn write(volume: &Volume, offset: u64, round: u64) {
    volume.write(WorkerId(0), offset, &content(offset, round)).unwrap();
}

pub fn read(volume: &Volume, offset: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0xee; PAGE_SIZE];
    volume.read(WorkerId(0), offset, &mut page).unwrap();
    page
}

#[track_caller]
pub fn expect(volume: &Volume, offset: u64, round: u64) {
    assert!(
        read(volume, offset) == content(offset, round),
        "the page at {offset:#x} differs from the written data"
    );
}

#[track_caller]
pub fn expect_zeroes(volume: &Volume, offset: u64) {
    assert!(read(volume, offset) == [0; PAGE_SIZE], "the page at {offset:#x} is not zeroes");
}

/// Returns the number of extents on each lease of the volume, in the order of their addition.
pub fn placed(volume: &Volume) -> Vec<u64> {
    volume.status().leases.iter().map(|lease| lease.used_extents).collect()
}

/// Returns the bytes that a lender stores: those outside of holes.
pub fn stored(server: &Nbdkit) -> u64 {
    let target = Target { address: server.address(), export: String::new(), tls: None };
    let mut connection = Connection::connect(target.into(), TIMEOUT).unwrap();
    let (mut at, mut stored) = (0, 0);
    while at < connection.size().0 {
        let mut runs = Vec::new();
        let rest = (connection.size().0 - at).min(1 << 30) as u32;
        connection.block_status(at, rest, &mut runs).unwrap();
        for run in runs {
            at += u64::from(run.length);
            stored += if run.hole { 0 } else { u64::from(run.length) };
        }
    }
    stored
}
