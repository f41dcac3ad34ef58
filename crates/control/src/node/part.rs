//! The settling of leases with hosts that neither the configuration nor the cluster names any more.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use aquifer_page::HostName;

use super::offers::Waiting;
use super::{EventKind, Node, Output};
use crate::Event;

/// Periods between two attempts to settle leases with former peers.
const PARTING_PERIODS: u32 = 10;

impl Node {
    /// Returns the hosts that are no longer peers but still share leases with this host.
    pub fn former_peers(&self) -> BTreeSet<HostName> {
        let lent = self.controller.lent().into_iter().map(|lent| lent.lease.borrower);
        let borrowed = self.controller.borrowed().into_iter().map(|held| held.lease.lender);
        lent.chain(borrowed).filter(|host| !self.settings.peers.contains(host)).collect()
    }

    /// Leaves leases borrowed from former peers, and recalls leases lent to them.
    pub(super) fn part_with_former_peers(&mut self) {
        let due = self.settings.period * PARTING_PERIODS;
        if self.parted.is_some_and(|last| !self.passed(due, last)) {
            return;
        }
        let is_first = self.parted.replace(self.now).is_none();
        for host in self.former_peers() {
            if is_first {
                self.outputs.push(Output::Warning(self.former_peer(&host)));
            }
            match self.lends_to_regions(&host) {
                // Only another lender can take these pages.
                true => self.with_offers(Waiting::Part(host)),
                false => self.step(Event::Part { host }),
            }
        }
    }

    fn former_peer(&self, host: &HostName) -> String {
        let (lent, held) = self.shared_with(host);
        let lent = lent.map(|lent| format!("holds lease {lent}, which this host recalls"));
        let held =
            held.map(|held| format!("has lent this host lease {held}, which this host vacates"));
        let parts: Vec<_> = lent.into_iter().chain(held).collect();
        format!("{host} is no peer of this host any more, but {}", parts.join(" and "))
    }

    /// Notes that a host is down, with the leases that this concerns.
    pub(super) fn host_down(&mut self, host: &HostName, address: SocketAddr) {
        let (lent, held) = self.shared_with(host);
        let held = held.map(|held| format!("pages of this host are there, in lease {held}"));
        let lent = lent.map(|lent| format!("pages of it are here, in lease {lent}"));
        let down = format!("{host} at {address} answers no host, or stopped");
        let parts: Vec<_> = [down].into_iter().chain(held).chain(lent).collect();
        self.note(EventKind::HostDown, host, parts.join("; "));
    }

    /// Returns the ids of the leases that this host gave to `host`, and of those that it holds of
    /// `host`; `None` if there are none.
    fn shared_with(&self, host: &HostName) -> (Option<String>, Option<String>) {
        let lent = self.controller.lent().into_iter().filter(|lent| lent.lease.borrower == *host);
        let held = self.controller.borrowed().into_iter().filter(|held| held.lease.lender == *host);
        let listed = |ids: Vec<String>| (!ids.is_empty()).then(|| ids.join(", "));
        (
            listed(lent.map(|lent| lent.lease.lease.to_string()).collect()),
            listed(held.map(|held| held.lease.lease.to_string()).collect()),
        )
    }
}
