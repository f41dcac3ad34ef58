//! The pages that this host keeps for caches of the same group on other hosts, while memory is
//! unneeded.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use aquifer_nbd::server::{self, Exports, Peer, Refused, Storage, Zeroes};
use aquifer_page::{Bytes, Group, PAGE_SIZE, lock};
use aquifer_transport::serving::Connections;
use rustix::io::Errno;

use super::pages::{Key, Pages};

const PAGE: u64 = PAGE_SIZE as u64;

/// Size of each borrower's export: the offsets of a lender's pages have 62 bits.
pub(super) const SIZE: Bytes = Bytes(1 << 62);

/// The exports of a cache that lends: one for each borrower, named `GROUP/` and a name that the
/// borrower chooses. An export is empty when it is first opened, and is removed with its last
/// connection.
#[derive(Debug)]
pub(super) struct RemoteExports {
    group: Group,
    pages: Arc<Pages>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    borrowers: HashMap<String, Borrower>,
    next: u32,
}

#[derive(Debug)]
struct Borrower {
    number: u32,
    connections: u64,
    from: String,
}

/// A borrower's pages, as a disk. A dropped page reads as zeroes, which the borrower detects by its
/// hash.
#[derive(Debug)]
struct Handle {
    number: u32,
    name: String,
    exports: Arc<RemoteExports>,
}

/// The NBD server's view of the exports.
#[derive(Debug)]
pub(super) struct Borrowers(pub(super) Arc<RemoteExports>);

impl RemoteExports {
    pub(super) fn new(group: Group, pages: Arc<Pages>) -> Self {
        Self { group, pages, open: Mutex::default() }
    }

    /// Returns the borrowers' hosts and addresses, sorted.
    pub(super) fn borrowers(&self) -> Vec<String> {
        let mut from: Vec<_> =
            lock(&self.open).borrowers.values().map(|one| one.from.clone()).collect();
        from.sort();
        from
    }

    fn open(self: &Arc<Self>, name: &str, peer: &Peer) -> Result<Handle, Refused> {
        let mut open = lock(&self.open);
        let next = open.next;
        let borrower = open.borrowers.entry(name.to_owned());
        let borrower = borrower.or_insert_with(|| Borrower {
            number: next,
            connections: 0,
            from: peer.to_string(),
        });
        borrower.connections += 1;
        let number = borrower.number;
        if number == next {
            open.next = next.wrapping_add(1);
        }
        Ok(Handle { number, name: name.to_owned(), exports: self.clone() })
    }
}

impl Handle {
    /// Returns the key of the page at an offset.
    fn key(&self, offset: u64) -> Key {
        Key { lent: true, disk: self.number, page: offset / PAGE }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut open = lock(&self.exports.open);
        let Some(borrower) = open.borrowers.get_mut(&self.name) else { return };
        borrower.connections -= 1;
        if borrower.connections == 0 {
            open.borrowers.remove(&self.name);
            drop(open);
            self.exports.pages.forget(self.key(0), u64::MAX);
        }
    }
}

impl Connections for Borrowers {}

impl Exports for Borrowers {
    fn open(&self, name: &str, peer: &Peer) -> Result<Storage, Refused> {
        match name.split_once('/') {
            Some((group, borrower)) if group == self.0.group.as_str() && !borrower.is_empty() => {
                Ok(Storage::Disk(Arc::new(self.0.open(name, peer)?)))
            }
            _ => Err(Refused::Unknown(name.to_owned())),
        }
    }

    fn list(&self, _: &Peer) -> Vec<String> {
        Vec::new()
    }
}

/// Rejects ranges that are not whole pages.
fn check(offset: u64, length: u64) -> io::Result<()> {
    if offset.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) {
        Ok(())
    } else {
        Err(Errno::INVAL.into())
    }
}

impl server::Disk for Handle {
    fn size(&self) -> Bytes {
        SIZE
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check(offset, into.len() as u64)?;
        for (at, page) in (offset..).step_by(PAGE_SIZE).zip(into.chunks_exact_mut(PAGE_SIZE)) {
            if !self.exports.pages.read(self.key(at), 0, page) {
                page.fill(0);
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        check(offset, from.len() as u64)?;
        for (at, page) in (offset..).step_by(PAGE_SIZE).zip(from.chunks_exact(PAGE_SIZE)) {
            if !self.exports.pages.put(self.key(at), page) {
                return Err(Errno::NOSPC.into());
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        check(offset, length)?;
        self.exports.pages.forget(self.key(offset), length / PAGE);
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, _: Zeroes) -> io::Result<()> {
        self.trim(offset, length)
    }
}
