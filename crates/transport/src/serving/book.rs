//! Connections of a listener, and the choice of the one that ends when another needs its place.

use std::collections::BTreeMap;
use std::net::IpAddr;

use aquifer_page::LeaseId;

/// Most connections that a listener serves at the same time.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections of all hosts together.
    pub all: usize,
    /// Connections from one IP address.
    ///
    /// The default has room for five NVMe controllers with 64 I/O queues and an admin queue each.
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
    /// Returns the address to which a connection counts; `None` if its host is exempt.
    pub fn host(self, ip: Option<IpAddr>) -> Option<IpAddr> {
        ip.map(|ip| ip.to_canonical()).filter(|ip| !(self.exempts_loopback && ip.is_loopback()))
    }
}

/// Refusal of a connection: a limit is reached, and no connection can make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Full {
    #[error("the limit of {0} connections is reached")]
    All(usize),
    #[error("its host already has {0} connections, the limit")]
    Host(usize),
}

/// Open connections, each with the listener's handle to it.
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
    /// The client has chosen its lease or other export, so the connection keeps its place.
    settled: bool,
    /// Lease that the client wants; `None` before it says so, and for other exports.
    lease: Option<LeaseId>,
    /// The listener has shut the connection down to make room.
    leaving: bool,
}

impl<C> Book<C> {
    pub(super) fn new(limits: ConnectionLimits) -> Self {
        Self { limits, next: 0, open: BTreeMap::new() }
    }

    /// Takes in a connection. Returns its number, and the handle of the connection that the caller
    /// must end to make room, if any.
    ///
    /// The connection to end is the one that has been longest in its handshake. A client that has
    /// not made its choice must not keep out a borrower that returns to its pages. A host at its
    /// limit makes room among its own connections only.
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

    /// Records the lease that a client wants, before the client is admitted to it.
    pub(super) fn note(&mut self, id: u64, lease: LeaseId) {
        if let Some(entry) = self.open.get_mut(&id) {
            entry.lease = Some(lease);
        }
    }

    /// Records the client's choice: the connection keeps its place.
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

    /// Returns all connections, each with its lease.
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

    /// Admits a connection with its number as the handle. Returns the handle of the connection that
    /// leaves.
    fn admit(book: &mut Book<u64>, ip: Option<IpAddr>) -> Result<Option<u64>, Full> {
        let handle = book.next + 1;
        book.admit(ip, handle).map(|(id, leaves)| {
            assert_eq!(id, handle);
            leaves.copied()
        })
    }

    /// Admits a connection and records its client's choice at once.
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
