//! Pages of caches of the same group on other hosts, kept here for as long as there is memory that nobody needs.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use aquifer_fabric::nbd::server::{self, Export, Exports, Peer, Refused, Zeroes};
use aquifer_page::{Bytes, Group, PAGE_SIZE};
use rustix::io::Errno;

use super::pages::{Key, Pages, locked};

const PAGE: u64 = PAGE_SIZE as u64;

/// So much of every borrower's pages can be asked for: all that the protocol has numbers for, and a bit.
pub(super) const SIZE: Bytes = Bytes(1 << 62);

/// The exports of a cache that lends: one for each borrower, by the name `GROUP/` and whatever the borrower calls itself. It is there when it is asked for, empty,
/// and gone with its last connection.
#[derive(Debug)]
pub(super) struct Lent {
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

/// What a borrower has here, as a disk. A page that has left reads as zeroes: the borrower knows what it was.
#[derive(Debug)]
struct Handle {
    number: u32,
    name: String,
    lent: Arc<Lent>,
}

/// As it is served.
#[derive(Debug)]
pub(super) struct Borrowers(pub(super) Arc<Lent>);

impl Lent {
    pub(super) fn new(group: Group, pages: Arc<Pages>) -> Self {
        Self { group, pages, open: Mutex::default() }
    }

    /// Who has pages here.
    pub(super) fn borrowers(&self) -> Vec<String> {
        let mut from: Vec<_> =
            locked(&self.open).borrowers.values().map(|one| one.from.clone()).collect();
        from.sort();
        from
    }

    fn open(self: &Arc<Self>, name: &str, peer: &Peer) -> Result<Handle, Refused> {
        let mut open = locked(&self.open);
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
        Ok(Handle { number, name: name.to_owned(), lent: self.clone() })
    }
}

impl Handle {
    /// The page of an offset.
    fn key(&self, offset: u64) -> Key {
        Key { lent: true, disk: self.number, page: offset / PAGE }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut open = locked(&self.lent.open);
        let Some(borrower) = open.borrowers.get_mut(&self.name) else { return };
        borrower.connections -= 1;
        if borrower.connections == 0 {
            open.borrowers.remove(&self.name);
            drop(open);
            self.lent.pages.forget(self.key(0), u64::MAX);
        }
    }
}

impl Exports for Borrowers {
    fn open(&self, name: &str, peer: &Peer) -> Result<Export, Refused> {
        match name.split_once('/') {
            Some((group, borrower)) if group == self.0.group.as_str() && !borrower.is_empty() => {
                Ok(Export::Disk(Arc::new(self.0.open(name, peer)?)))
            }
            _ => Err(Refused::Unknown(name.to_owned())),
        }
    }

    fn list(&self, _: &Peer) -> Vec<String> {
        Vec::new()
    }
}

/// Whole pages only.
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
            if !self.lent.pages.read(self.key(at), 0, page) {
                page.fill(0);
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        check(offset, from.len() as u64)?;
        for (at, page) in (offset..).step_by(PAGE_SIZE).zip(from.chunks_exact(PAGE_SIZE)) {
            if !self.lent.pages.put(self.key(at), page) {
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
        self.lent.pages.forget(self.key(offset), length / PAGE);
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, _: Zeroes) -> io::Result<()> {
        self.trim(offset, length)
    }
}
