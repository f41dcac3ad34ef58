//! Recall of lent memory by the operator's order, and the settling of leases with former peers.

use std::collections::BTreeSet;
use std::time::Instant;

use aquifer_api::order::{Drain, Draining, Left};
use aquifer_api::status::EventKind;
use aquifer_control::{Event, LentStatus, LoanState, Message};
use aquifer_page::{Bytes, HostName};

use super::Driver;

/// Periods between two attempts to settle leases with former peers.
const PARTING_PERIODS: u32 = 10;

impl Driver {
    pub(super) fn order_drain(&mut self, order: Drain) -> Draining {
        if self.draining != order.on {
            self.draining = order.on;
            let what = match order.on {
                true => {
                    format!("recalls all leases, {} in all, and lends nothing", self.lent_bytes())
                }
                false => "lends again".to_owned(),
            };
            self.parts.events.note(EventKind::Drain, &self.parts.config.host, what);
            self.step(Event::Drain { on: order.on });
        }
        self.draining()
    }

    fn lent_bytes(&self) -> Bytes {
        self.parts.lender.stored()
    }

    /// Returns the progress of a drain.
    pub(super) fn draining(&self) -> Draining {
        let stored = self.parts.lender.stored_by_lease();
        let left = self.controller.lent().into_iter().map(|lent| Left {
            lease: lent.lease.lease,
            bytes: stored.get(&lent.lease.lease).copied().unwrap_or_default(),
            why: self.why_left(&lent),
            io_timeout_ms: self.io_timeout_ms.get(&lent.lease.borrower).copied(),
            borrower: lent.lease.borrower,
        });
        Draining { on: self.draining, left: left.collect() }
    }

    fn why_left(&self, lent: &LentStatus) -> String {
        let borrower = &lent.lease.borrower;
        let unsettled = |host: &HostName| host == borrower;
        let peers = self.parts.peers.status_with(unsettled);
        let peer = peers.into_iter().find(|peer| peer.host == *borrower);
        match (lent.state, self.told.get(&lent.lease.lease), peer) {
            (LoanState::Freeing, ..) => "this host is freeing its memory".to_owned(),
            (LoanState::Opening, ..) => "this host is setting it up".to_owned(),
            (LoanState::Offered | LoanState::Held, ..) => "it is not recalled yet".to_owned(),
            (_, _, None) => format!(
                "{borrower} is no longer a peer, and its address is unknown: \
                 it must give the lease back itself"
            ),
            (_, _, Some(peer)) if peer.error.is_some() && !peer.refused => {
                format!("{borrower} does not answer: {}", peer.error.unwrap_or_default())
            }
            (_, _, Some(peer)) if peer.refused => {
                format!("{borrower} refuses: {}", peer.error.unwrap_or_default())
            }
            (_, Some(failed), _) => format!("{borrower} cannot move it yet: {failed}"),
            (_, None, _) => format!("{borrower} is moving it"),
        }
    }

    /// Notes the end of a drain, once.
    pub(super) fn note_drained(&mut self) {
        let empty = self.controller.lent().is_empty();
        if self.draining && empty && !self.drained {
            self.parts.events.note(
                EventKind::Drain,
                &self.parts.config.host,
                "all leases are back",
            );
        }
        self.drained = self.draining && empty;
    }

    /// Returns the hosts that are no longer peers but still share leases with this host.
    pub(super) fn former_peers(&self) -> BTreeSet<HostName> {
        let lent = self.controller.lent().into_iter().map(|lent| lent.lease.borrower);
        let borrowed = self.controller.borrowed().into_iter().map(|held| held.lease.lender);
        lent.chain(borrowed).filter(|host| !self.parts.peers.knows(host)).collect()
    }

    /// Leaves leases borrowed from former peers, and recalls leases lent to them.
    pub(super) fn part_with_former_peers(&mut self) {
        let due = self.parts.config.memory.period * PARTING_PERIODS;
        let first = self.parted.is_none();
        if self.parted.is_some_and(|last| last.elapsed() < due) {
            return;
        }
        self.parted = Some(Instant::now());
        for host in self.former_peers() {
            if first {
                tracing::warn!("{}", self.former_peer(&host));
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
        format!("{host} is not a [[peer]] in the configuration, but {}", parts.join(" and "))
    }

    /// Tells whether a host may send this message. A former peer may still settle leases between
    /// the two hosts.
    pub(super) fn may_say(&self, from: &HostName, message: &Message) -> bool {
        let holds = |lease| {
            let borrowed = self.controller.borrowed();
            borrowed.iter().any(|held| held.lease.lease == lease && held.lease.lender == *from)
        };
        self.parts.peers.knows(from)
            || match message {
                Message::MemBorFin { lease } => self.parts.lender.is_of(*lease, from),
                Message::MemBorAck { lease, .. } | Message::MemLenFin { lease } => holds(*lease),
                Message::MemBorReq { .. } | Message::MemBorRej { .. } => false,
            }
    }
}
