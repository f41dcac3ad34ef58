//! The settling of leases with hosts that neither the configuration nor the cluster names any more.

use std::collections::BTreeSet;

use aquifer_page::HostName;

use super::{Node, Output};
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
            self.step(Event::Part { host });
        }
    }

    fn former_peer(&self, host: &HostName) -> String {
        let lent = self.controller.lent().into_iter().filter(|lent| lent.lease.borrower == *host);
        let lent: Vec<_> = lent.map(|lent| lent.lease.lease.to_string()).collect();
        let held = self.controller.borrowed().into_iter().filter(|held| held.lease.lender == *host);
        let held: Vec<_> = held.map(|held| held.lease.lease.to_string()).collect();
        let mut parts = Vec::new();
        if !lent.is_empty() {
            parts.push(format!("holds lease {}, which this host recalls", lent.join(", ")));
        }
        if !held.is_empty() {
            let held = held.join(", ");
            parts.push(format!("has lent this host lease {held}, which this host vacates"));
        }
        format!("{host} is no peer of this host any more, but {}", parts.join(" and "))
    }
}
