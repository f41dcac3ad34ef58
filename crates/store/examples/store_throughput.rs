//! A benchmark of single page writes and reads, with and without sharing: `store_throughput [MIB]`.
//!
//! It prints microseconds per page of 4 KiB, the least of several interleaved rounds.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;
use std::{fs, process};

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{Lease, LeaseRecord, Store};

const PAGE: u64 = PAGE_SIZE as u64;
const ROUNDS: usize = 5;
/// Number of different contents in the runs with duplicate pages.
const EQUAL: u64 = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let mib = std::env::args().nth(1).map_or(Ok(256), |text| text.parse())?;
    let dir = PathBuf::from(format!("/dev/shm/aquifer-throughput-{}", process::id()));
    let result = measure(&Store::open(&dir)?, Bytes::mib(mib));
    fs::remove_dir_all(&dir)?;
    result
}

fn measure(store: &Store, capacity: Bytes) -> Result<(), Box<dyn Error>> {
    println!("us a page            first write  overwrite       read    discard");
    let mut best = [[f64::INFINITY; 4]; 4];
    for round in 0..ROUNDS {
        for (kind, best) in best.iter_mut().enumerate() {
            let (shared, distinct) = (kind % 2 == 1, if kind < 2 { u64::MAX } else { EQUAL });
            let times = once(store, capacity, shared, distinct, round as u64)?;
            best.iter_mut().zip(times).for_each(|(best, time)| *best = best.min(time));
        }
    }
    let names = ["own, unique", "shared, unique", "own, duplicate", "shared, duplicate"];
    for (name, [first, overwrite, read, discard]) in names.iter().zip(best) {
        println!("{name:<20} {first:>11.2} {overwrite:>10.2} {read:>10.2} {discard:>10.2}");
    }
    Ok(())
}

/// Writes all pages of a new lease, overwrites them, reads them and discards them.
fn once(
    store: &Store,
    capacity: Bytes,
    shared: bool,
    distinct: u64,
    round: u64,
) -> Result<[f64; 4], Box<dyn Error>> {
    let lease =
        store.create(LeaseRecord { shared, ..LeaseRecord::new("borrower".parse()?, capacity) })?;
    let id = lease.id();
    let mut page = [0x5A; PAGE_SIZE];
    let mut write = |seed: u64| {
        each(capacity, |number| {
            page[..8].copy_from_slice(&(number % distinct + 1 + (seed << 40)).to_le_bytes());
            lease.write(number * PAGE, &page)
        })
    };
    let (first, overwrite) = (write(2 * round)?, write(2 * round + 1)?);
    let mut buffer = [0; PAGE_SIZE];
    let read = each(capacity, |number| Lease::read(&lease, number * PAGE, &mut buffer))?;
    let discard = each(capacity, |number| lease.discard(number * PAGE, PAGE))?;
    store.remove(id)?;
    Ok([first, overwrite, read, discard])
}

/// Returns the microseconds per page that `act` takes, in an order without adjacent pages.
fn each<E>(capacity: Bytes, mut act: impl FnMut(u64) -> Result<(), E>) -> Result<f64, E> {
    let pages = capacity.pages();
    let began = Instant::now();
    for number in 0..pages {
        act(number * 7919 % pages)?;
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / pages as f64)
}
