//! Which connections a listener has, and which of them leaves when another needs its place.

use std::collections::BTreeMap;
use std::net::IpAddr;

use aquifer_page::LeaseId;

/// How many connections a listener has at the same time.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections of all hosts together.
    pub all: usize,
    /// Connections from one IP address.
    ///
    /// The default is room for five NVMe controllers of 64 I/O queues and an admin queue each.
    pub per_host: usize,
    /// Whether loopback addresses are exempt from `per_host`, as unix sockets always are.
    pub exempts_loopback: bool,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { all: 1024, per_host: 384, exempts_loopback: true }
    }
}

impl ConnectionLimits {
    /// The address to which a connection counts, if its host is not exempt.
    pub(crate) fn host(self, ip: Option<IpAddr>) -> Option<IpAddr> {
        ip.map(|ip| ip.to_canonical()).filter(|ip| !(self.exempts_loopback && ip.is_loopback()))
    }
}

/// Why a connection is refused: so many are there, and all have said what they want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Full {
    #[error("there are {0} connections already")]
    All(usize),
    #[error("its host has {0} connections already")]
    Host(usize),
}

/// The connections there are, each with a handle of the listener's.
#[derive(Debug)]
pub(super) struct Book<C> {
    limits: ConnectionLimits,
    next: u64,
    open: BTreeMap<u64, Entry<C>>,
}

#[derive(Debug)]
struct Entry<C> {
    handle: C,
    host: Option<IpAddr>,
    /// The client has said what it wants.
    settled: bool,
    /// What it wants, unless that is something else than a lease.
    lease: Option<LeaseId>,
    /// It was told to make room.
    leaving: bool,
}

impl<C> Book<C> {
    pub(super) fn new(limits: ConnectionLimits) -> Self {
        Self { limits, next: 0, open: BTreeMap::new() }
    }

    /// Takes a connection in. Returns its number, and the connection that the caller must end to make room, if there is one.
    ///
    /// It is the one that has been in its handshake the longest: a client that has not said what it wants must not keep
    /// out a borrower that is on its way back to its pages. A host at its limit makes room among its own only.
    pub(super) fn admit(
        &mut self,
        ip: Option<IpAddr>,
        handle: C,
    ) -> Result<(u64, Option<&C>), Full> {
        let host = self.limits.host(ip);
        let of_host =
            host.map_or(0, |_| self.open.values().filter(|entry| entry.host == host).count());
        let leaves = if of_host >= self.limits.per_host {
            Some(self.dawdler(|entry| entry.host == host).ok_or(Full::Host(of_host))?)
        } else if self.open.len() >= self.limits.all {
            Some(self.dawdler(|_| true).ok_or(Full::All(self.open.len()))?)
        } else {
            None
        };
        self.next += 1;
        let entry = Entry { handle, host, settled: false, lease: None, leaving: false };
        self.open.insert(self.next, entry);
        let leaves = leaves.and_then(|id| self.open.get_mut(&id)).map(|entry| {
            entry.leaving = true;
            &entry.handle
        });
        Ok((self.next, leaves))
    }

    fn dawdler(&self, may_leave: impl Fn(&Entry<C>) -> bool) -> Option<u64> {
        let dawdles = |entry: &Entry<C>| !entry.settled && !entry.leaving && may_leave(entry);
        self.open.iter().find(|(_, entry)| dawdles(entry)).map(|(&id, _)| id)
    }

    /// The client wants this lease, and is not let in yet.
    pub(super) fn note(&mut self, id: u64, lease: LeaseId) {
        if let Some(entry) = self.open.get_mut(&id) {
            entry.lease = Some(lease);
        }
    }

    /// The client has said what it wants.
    pub(super) fn settle(&mut self, id: u64, lease: Option<LeaseId>) {
        if let Some(entry) = self.open.get_mut(&id) {
            entry.settled = true;
            entry.lease = lease;
        }
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.open.remove(&id);
    }

    pub(super) fn get(&self, id: u64) -> Option<&C> {
        self.open.get(&id).map(|entry| &entry.handle)
    }

    /// All connections, with the lease of each.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Option<LeaseId>, &C)> {
        self.open.iter().map(|(&id, entry)| (id, entry.lease, &entry.handle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits =
        ConnectionLimits { all: 6, per_host: 3, exempts_loopback: true };

    fn host(number: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, number]))
    }

    /// Admits a connection, which gets its number for a handle, and says which one leaves.
    fn admit(book: &mut Book<u64>, ip: Option<IpAddr>) -> Result<Option<u64>, Full> {
        let handle = book.next + 1;
        book.admit(ip, handle).map(|(id, leaves)| {
            assert_eq!(id, handle);
            leaves.copied()
        })
    }

    /// Admits a connection that says at once what it wants.
    fn settled(book: &mut Book<u64>, ip: Option<IpAddr>) -> Result<Option<u64>, Full> {
        let leaves = admit(book, ip)?;
        book.settle(book.next, None);
        Ok(leaves)
    }

    #[test]
    fn a_host_at_its_limit_is_refused_and_another_is_not() {
        let mut book = Book::new(LIMITS);
        for _ in 0..3 {
            assert_eq!(settled(&mut book, host(1)), Ok(None));
        }
        assert_eq!(admit(&mut book, host(1)), Err(Full::Host(3)));
        for _ in 0..3 {
            assert_eq!(settled(&mut book, host(2)), Ok(None));
        }
        assert_eq!(admit(&mut book, host(3)), Err(Full::All(6)));
        book.remove(2);
        assert_eq!(settled(&mut book, host(1)), Ok(None));
    }

    #[test]
    fn a_host_at_its_limit_makes_room_among_its_own() {
        let mut book = Book::new(LIMITS);
        assert_eq!(admit(&mut book, host(2)), Ok(None));
        assert_eq!(settled(&mut book, host(1)), Ok(None));
        assert_eq!(admit(&mut book, host(1)), Ok(None));
        assert_eq!(settled(&mut book, host(1)), Ok(None));
        assert_eq!(
            admit(&mut book, host(1)),
            Ok(Some(3)),
            "host 2 has been in its handshake longer"
        );
        assert_eq!(admit(&mut book, host(1)), Ok(Some(5)), "the third leaves already");
    }

    #[test]
    fn all_together_make_room_among_all() {
        let mut book = Book::new(LIMITS);
        for number in [1, 1, 2, 2, 3, 3] {
            assert_eq!(admit(&mut book, host(number)), Ok(None));
        }
        assert_eq!(admit(&mut book, host(4)), Ok(Some(1)));
    }

    #[test]
    fn hosts_are_told_apart_by_their_address_in_either_form() {
        let mut book = Book::new(LIMITS);
        let mapped = Some(IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x0a00, 1]));
        for ip in [host(1), mapped, host(1)] {
            assert_eq!(settled(&mut book, ip), Ok(None));
        }
        assert_eq!(admit(&mut book, mapped), Err(Full::Host(3)));
    }

    #[test]
    fn this_host_is_bound_by_the_limit_of_all_only() {
        let loopback = Some(IpAddr::from([127, 0, 0, 1]));
        let mut book = Book::new(LIMITS);
        for ip in [None, None, None, loopback, loopback, loopback] {
            assert_eq!(settled(&mut book, ip), Ok(None));
        }
        assert_eq!(admit(&mut book, loopback), Err(Full::All(6)));
        assert_eq!(admit(&mut book, None), Err(Full::All(6)));

        let mut book =
            Book::new(ConnectionLimits { per_host: 3, exempts_loopback: false, ..LIMITS });
        for _ in 0..3 {
            assert_eq!(settled(&mut book, loopback), Ok(None));
        }
        assert_eq!(admit(&mut book, loopback), Err(Full::Host(3)));
    }
}
