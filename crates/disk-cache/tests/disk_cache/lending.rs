//! Tests of caches that lend to each other. A client reads the bytes that it wrote, whatever the
//! lender does, and a lender cannot read them.
//!
//! The tests need root. `AQUIFER_SECONDS` is the duration of the clients' work (4 by default).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_disk_cache::{LenderStatus, Options};
use aquifer_nbd::client::{Connection, Target};
use aquifer_nbd::server::{Disk, Exports, Peer, Refused, Security, Server, Storage, Zeroes};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::Address;
use aquifer_transport::serving::Connections;

use crate::common::{Here, PAGE, TIMEOUT, is_root, seconds, until, work};

/// How often the lender dies while clients work.
const KILLS: u32 = 3;

fn target(address: &Address, export: &str) -> Target {
    Target { address: address.clone(), export: export.to_owned(), tls: None }
}

fn connect(address: &Address, export: &str) -> Result<Connection, String> {
    Connection::connect(Arc::new(target(address, export)), TIMEOUT)
        .map_err(|error| error.to_string())
}

/// Makes options of a lender at this port of the loopback interface; 0 for any port.
fn lending(port: u16, size: Bytes) -> Options {
    let address = Address::Tcp { host: "127.0.0.1".to_owned(), port };
    Options { size, lends: vec![(address, Security::Plain)], ..Options::default() }
}

fn borrowing(from: &Address, size: Bytes) -> Here {
    let here = Here::with(Options { size, lenders: vec![target(from, "")], ..Options::default() });
    until(|| lender(&here).answers);
    here
}

fn lender(here: &Here) -> LenderStatus {
    here.status().lenders.remove(0)
}

#[test]
fn evicted_pages_survive_a_lender_that_shrinks_and_restarts() {
    if !is_root() {
        return;
    }
    let mut there = Here::with(lending(0, Bytes::mib(16)));
    let address = there.status().lends.remove(0);
    let Address::Tcp { port, .. } = address else { panic!("{address}") };
    let here = borrowing(&address, Bytes::mib(2));
    let has_read = |from: &LenderStatus, more: Bytes| {
        let now = lender(&here);
        now.answers && now.read_bytes > from.read_bytes + more
    };
    let before = lender(&here);
    work(&here, seconds() / 2, |_| has_read(&before, Bytes::mib(1)));
    let calm = lender(&here);
    assert!(calm.wrong_bytes == Bytes::ZERO, "{calm:?}");
    // The lender dies each time after some pages were read from it, and thus in the middle of other
    // work.
    let (mut killed, mut last) = (0, calm.clone());
    work(&here, seconds(), |chance| {
        there.resize(Bytes(if chance.below(4) == 0 { 0 } else { chance.below(16 << 20) }));
        here.resize(Bytes(if chance.below(4) == 0 { 0 } else { chance.below(4 << 20) }));
        if !has_read(&last, Bytes(8 * PAGE)) {
            return false;
        }
        if killed == KILLS {
            return lender(&here).dropped_bytes > Bytes::ZERO;
        }
        last = lender(&here);
        // The lender's pages go with the service.
        there.service = None;
        there.start(lending(port, Bytes::mib(16)));
        killed += 1;
        false
    });
    let wild = lender(&here);
    assert_eq!((killed, wild.wrong_bytes), (KILLS, Bytes::ZERO), "{wild:?}");

    // The lender keeps no pages of a closed disk, or of a borrower that is gone.
    there.resize(Bytes::mib(16));
    here.resize(Bytes::ZERO);
    let (path, _) = here.disk("other", 4 << 20);
    let mut client = here.connect(&path);
    let mut all = vec![0; 4 << 20];
    until(|| {
        client.read(0, &mut all).unwrap();
        there.status().lent > Bytes::mib(1)
    });
    assert_eq!(there.status().borrowers.len(), 1);
    drop(client);
    until(|| there.status().lent == Bytes::ZERO);
    let mut client = here.connect(&path);
    until(|| {
        client.read(0, &mut all).unwrap();
        there.status().lent > Bytes::mib(1)
    });
    drop(here);
    until(|| there.status().borrowers.is_empty() && there.status().used == Bytes::ZERO);
}

#[test]
fn a_lender_serves_its_group_and_keeps_borrowers_apart() {
    if !is_root() {
        return;
    }
    let there = Here::with(lending(0, Bytes::mib(1)));
    let address = there.status().lends.remove(0);
    for name in ["", "blue", "blue/", "red/one", "/etc/passwd"] {
        assert!(connect(&address, name).unwrap_err().contains("no export"), "{name}");
    }
    let (mut one, mut other) =
        (connect(&address, "blue/one").unwrap(), connect(&address, "blue/other").unwrap());
    let mut page = vec![1; PAGE_SIZE];
    one.write(7 * PAGE, &page).unwrap();
    other.read(7 * PAGE, &mut page).unwrap();
    assert_eq!(page, [0; PAGE_SIZE]);
    // All connections of one borrower see the same pages.
    connect(&address, "blue/one").unwrap().read(7 * PAGE, &mut page).unwrap();
    assert_eq!(page, [1; PAGE_SIZE]);
    other.write(7 * PAGE, &[2; PAGE_SIZE]).unwrap();
    assert_eq!((there.status().lent, there.status().used), (Bytes(2 * PAGE), Bytes(2 * PAGE)));
    other.trim(0, 64 << 20).unwrap();
    one.read(7 * PAGE, &mut page).unwrap();
    assert_eq!((page, there.status().lent), (vec![1; PAGE_SIZE], Bytes(PAGE)));
    assert!(one.write(1, &[0; PAGE_SIZE]).is_err() && one.read(0, &mut [0; 100]).is_err());
    there.resize(Bytes::ZERO);
    assert!(one.write(0, &[3; PAGE_SIZE]).unwrap_err().is_no_space());
}

/// A lender that takes a number of pages and then says that it is full.
#[derive(Debug, Default)]
struct Small {
    pages: Mutex<HashMap<u64, Vec<u8>>>,
    most: usize,
    refused: AtomicU64,
}

impl Disk for Small {
    fn size(&self) -> Bytes {
        Bytes(1 << 62)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let pages = self.pages.lock().unwrap();
        for (number, page) in (offset / PAGE..).zip(into.chunks_exact_mut(PAGE_SIZE)) {
            match pages.get(&number) {
                Some(kept) => page.copy_from_slice(kept),
                None => page.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let mut pages = self.pages.lock().unwrap();
        if pages.len() >= self.most {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(io::ErrorKind::StorageFull.into());
        }
        pages.insert(offset / PAGE, from.to_vec());
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        let gone = offset / PAGE..(offset + length) / PAGE;
        self.pages.lock().unwrap().retain(|page, _| !gone.contains(page));
        Ok(())
    }

    fn write_zeroes(&self, _: u64, _: u64, _: Zeroes) -> io::Result<()> {
        Ok(())
    }
}

struct Lends(Arc<dyn Disk>);

impl Connections for Lends {}

impl Exports for Lends {
    fn open(&self, _: &str, _: &Peer) -> Result<Storage, Refused> {
        Ok(Storage::Disk(self.0.clone()))
    }

    fn list(&self, _: &Peer) -> Vec<String> {
        Vec::new()
    }
}

#[test]
fn a_full_lender_drops_all_pages_of_a_closed_disk() {
    if !is_root() {
        return;
    }
    // Of a batch of 64 pages, some arrive before the lender refuses one.
    let small = Arc::new(Small { most: 100, ..Small::default() });
    let address = Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let exports = Arc::new(Lends(small.clone()));
    let server = Server::bind(&address, Security::Plain, exports).unwrap();
    let here = borrowing(server.address(), Bytes::ZERO);
    let (path, content) = here.disk("disk", 4 << 20);
    for _ in 0..3 {
        let mut client = here.connect(&path);
        let (mut read, before) = (vec![0; 4 << 20], small.refused.load(Ordering::Relaxed));
        until(|| {
            client.read(0, &mut read).unwrap();
            small.refused.load(Ordering::Relaxed) > before
        });
        assert!(read == content);
        drop(client);
        until(|| small.pages.lock().unwrap().is_empty());
    }
    assert_eq!(lender(&here).wrong_bytes, Bytes::ZERO);
}

/// A lender that returns wrong pages, and inspects those it receives.
#[derive(Debug, Default)]
struct Liar {
    pages: Mutex<HashMap<u64, Vec<Vec<u8>>>>,
    asked: AtomicU64,
    /// Pages that contain plaintext of the borrower's disk.
    readable: AtomicU64,
}

/// A mark in every word of a disk.
const MARK: u64 = 0x5ec2_e75e_c2e7_0000;

impl Disk for Liar {
    fn size(&self) -> Bytes {
        Bytes(1 << 62)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let pages = self.pages.lock().unwrap();
        for (number, page) in (offset / PAGE..).zip(into.chunks_exact_mut(PAGE_SIZE)) {
            let versions = pages.get(&number).cloned().unwrap_or_else(|| vec![vec![0; PAGE_SIZE]]);
            let newest = versions.last().unwrap();
            page.copy_from_slice(newest);
            match self.asked.fetch_add(1, Ordering::Relaxed) % 7 {
                0 => page[1234] ^= 4,
                1 => page.copy_from_slice(&versions[0]),
                2 => page.copy_from_slice(
                    pages.values().next().and_then(|other| other.last()).unwrap_or(newest),
                ),
                3 => page.fill(0),
                _ => {}
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        for (number, page) in (offset / PAGE..).zip(from.chunks_exact(PAGE_SIZE)) {
            let is_ours = |word: &[u8]| word[2..] == MARK.to_le_bytes()[2..];
            if page.chunks_exact(8).any(is_ours) {
                self.readable.fetch_add(1, Ordering::Relaxed);
            }
            self.pages.lock().unwrap().entry(number).or_default().push(page.to_vec());
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn trim(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&self, _: u64, _: u64, _: Zeroes) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_lender_that_lies_is_found_out_and_can_read_nothing() {
    if !is_root() {
        return;
    }
    let liar = Arc::new(Liar::default());
    let address = Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let server = Server::bind(&address, Security::Plain, Arc::new(Lends(liar.clone()))).unwrap();
    let here = borrowing(server.address(), Bytes::mib(1));
    // Some returned pages are right, some wrong and some missing, and clients still read their own
    // bytes.
    work(&here, seconds(), |_| {
        let is = lender(&here);
        [is.wrong_bytes, is.dropped_bytes, is.read_bytes]
            .iter()
            .all(|bytes| *bytes > Bytes(10 * PAGE))
    });

    // The lender cannot see the guests' writes.
    let path = here.dir.path().join("secret");
    std::fs::write(&path, vec![0; 4 << 20]).unwrap();
    let mut client = here.connect(&path);
    let secret: Vec<u8> =
        (0..PAGE_SIZE as u64 / 8).flat_map(|word| (MARK | word).to_le_bytes()).collect();
    let before = lender(&here).sent_bytes;
    (0..1024).for_each(|page| client.write(page * PAGE, &secret).unwrap());
    let mut read = vec![0; PAGE_SIZE];
    until(|| {
        (0..1024).for_each(|page| client.read(page * PAGE, &mut read).unwrap());
        lender(&here).sent_bytes.0 > before.0 + (1 << 20)
    });
    assert!(read == secret);
    assert_eq!(liar.readable.load(Ordering::Relaxed), 0);
}
