//! A writer to a store, for tests that kill it: `store_writer DIR`.
//!
//! Once it prints "all written", pages 0 to 1023 of its only lease hold the bytes `page % 255 + 1`.
//! It then writes and discards the next 1024 pages in turn.

use std::error::Error;
use std::path::Path;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{LeaseRecord, Store};

const PAGE: u64 = PAGE_SIZE as u64;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args().nth(1).ok_or("usage: store_writer DIR")?;
    let store = Store::open(Path::new(&dir))?;
    let lease = store.create(LeaseRecord::new("borrower".parse()?, Bytes::mib(16)))?;
    for page in 0..1024 {
        lease.write(page * PAGE, &[(page % 255 + 1) as u8; PAGE_SIZE])?;
    }
    println!("all written");
    for round in 0u64.. {
        lease.write((1024 + round % 1024) * PAGE, &[1; PAGE_SIZE])?;
        lease.discard((1024 + (round + 512) % 1024) * PAGE, PAGE)?;
    }
    Ok(())
}
