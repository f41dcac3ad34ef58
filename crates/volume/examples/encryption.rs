//! The cost of encryption: writes and reads of single pages at two lenders, one of them with
//! encryption, in turns.
//!
//! `encryption ADDRESS ADDRESS`: the addresses of two NBD servers of at least 64 MiB each. Prints
//! JSON: microseconds a page, as medians of the rounds.

#![allow(clippy::unwrap_used, reason = "an example that fails ends")]

use std::time::Instant;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, VolumeId, WorkerId};
use aquifer_volume::{Encryption, LeaseTarget, Protocol, Volume, VolumeConfig};

const ROUNDS: usize = 40;
const PAGES: u64 = 1000;

fn main() {
    let addresses: Vec<_> =
        std::env::args().skip(1).take(2).map(|address| address.parse().unwrap()).collect();
    let encryptions = [None, Some(Encryption::random())];
    let volumes: Vec<_> = addresses
        .into_iter()
        .zip(encryptions)
        .map(|(address, encryption)| volume(address, encryption))
        .collect();
    let mut page = [0; PAGE_SIZE];
    let mut times = [const { Vec::new() }; 4];
    for round in 0..ROUNDS {
        for (which, volume) in volumes.iter().enumerate() {
            let [write, read] = [true, false].map(|writes| {
                let began = Instant::now();
                for number in 0..PAGES {
                    let offset = number * 7 % 16_384 * PAGE_SIZE as u64;
                    if writes {
                        page.fill((number + round as u64) as u8 | 1);
                        volume.write(WorkerId(0), offset, &page).unwrap();
                    } else {
                        volume.read(WorkerId(0), offset, &mut page).unwrap();
                        assert!(page.iter().all(|byte| *byte == (number + round as u64) as u8 | 1));
                    }
                }
                began.elapsed().as_secs_f64() * 1e6 / PAGES as f64
            });
            times[which * 2].push(write);
            times[which * 2 + 1].push(read);
        }
    }
    let medians = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    });
    let [clear_write, clear_read, encrypted_write, encrypted_read] = medians;
    println!(
        concat!(
            r#"{{"write_us": {:.2}, "encrypted_write_us": {:.2}, "#,
            r#""read_us": {:.2}, "encrypted_read_us": {:.2}}}"#
        ),
        clear_write, encrypted_write, clear_read, encrypted_read
    );
}

fn volume(address: aquifer_transport::Address, encryption: Option<Encryption>) -> Volume {
    let config = VolumeConfig {
        id: VolumeId::random(),
        capacity: Bytes(EXTENT_SIZE),
        workers: 1,
        io_timeout: VolumeConfig::DEFAULT_IO_TIMEOUT,
        tls: None,
        spill: None,
        ledger: None,
    };
    let volume = Volume::new(config).unwrap();
    let protocol = Protocol::Nbd { export: String::new(), secure: false };
    let capacity = Bytes(EXTENT_SIZE);
    let lender = "lender".parse().unwrap();
    volume
        .add_lease(LeaseTarget {
            lease: LeaseId::random(),
            lender,
            address,
            protocol,
            capacity,
            encryption,
            claim: None,
        })
        .unwrap();
    volume
}
