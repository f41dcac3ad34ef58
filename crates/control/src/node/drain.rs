//! The order to drain this host: the recall of all lent memory, and its progress.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, HostName, LeaseId};

use super::{Contact, EventKind, Node, Threshold, stored_in};
use crate::{Event, LentStatus, LoanState};

/// A lease that is still lent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The lease.
    pub lease: LeaseId,
    /// The host that holds the lease.
    pub borrower: HostName,
    /// The bytes still stored in the lease.
    pub bytes: Bytes,
    /// The reason why the lease is not free yet.
    pub why: String,
    /// How long the borrower's I/O waits for this host, in ms, as the borrower last said.
    pub io_timeout_ms: Option<u64>,
}

impl Node {
    pub(super) fn drain(&mut self, on: bool, stored: Bytes, vms: bool) {
        if self.belonging.has_left {
            return;
        }
        if vms {
            self.vacate(on);
        }
        // A host whose configuration lends nothing is always draining.
        if self.lending.draining == on || !self.controller.facts().config.lends {
            return;
        }
        self.lending.draining = on;
        let what = match on {
            true => format!("recalls all leases, {stored} in all, and lends nothing"),
            false => "lends again".to_owned(),
        };
        self.note(EventKind::Drain, self.host(), what);
        self.step(Event::Drain { on });
    }

    /// Notes the end of a drain, once.
    pub(super) fn note_drained(&mut self) {
        let empty = self.controller.lent().is_empty();
        if self.lending.draining && empty && !self.lending.drained {
            self.note(EventKind::Drain, self.host(), "all leases are back");
        }
        self.lending.drained = self.lending.draining && empty;
    }

    /// Returns whether this host lends nothing, because of an order or of its configuration.
    pub fn is_draining(&self) -> bool {
        self.lending.draining
    }

    /// Returns the bytes of which a VM that comes here can make use: none while this host drains.
    pub fn room(&self) -> Bytes {
        self.room_for_vms(Threshold::Upper)
    }

    /// Returns the same, up to a threshold: this host refuses a VM whose cache may take more.
    pub fn room_for_vms(&self, below: Threshold) -> Bytes {
        match self.admits_vms() {
            true => self.room_below(below),
            false => Bytes::ZERO,
        }
    }

    /// Returns whether VMs may come to this host, or start here by themselves: not while the
    /// operator drains it.
    pub fn admits_vms(&self) -> bool {
        // A host whose configuration lends nothing is always draining.
        let recalls = self.is_draining() && self.controller.facts().config.lends;
        !self.vacates() && !recalls && !self.belonging.has_left
    }

    /// Returns the leases that are still lent. `stored` has the bytes in each lease, and `peers`
    /// the latest results of calls to peers and former peers.
    pub fn left(
        &self,
        stored: &BTreeMap<LeaseId, Bytes>,
        peers: &BTreeMap<HostName, Contact>,
    ) -> Vec<Left> {
        let left = |lent: LentStatus| Left {
            lease: lent.lease.lease,
            bytes: stored_in(stored, lent.lease.lease),
            why: self.why_left(&lent, peers.get(&lent.lease.borrower)),
            io_timeout_ms: self.lending.io_timeout_ms.get(&lent.lease.borrower).copied(),
            borrower: lent.lease.borrower,
        };
        self.controller.lent().into_iter().map(left).collect()
    }

    fn why_left(&self, lent: &LentStatus, peer: Option<&Contact>) -> String {
        let borrower = &lent.lease.borrower;
        match (lent.state, self.lending.told.get(&lent.lease.lease), peer) {
            (LoanState::Freeing, ..) => "this host is freeing its memory".to_owned(),
            (LoanState::Opening, ..) => "this host is setting it up".to_owned(),
            (LoanState::Offered | LoanState::Held, ..) => "it is not recalled yet".to_owned(),
            (_, _, None) => format!(
                "{borrower} is no longer a peer, and its address is unknown: \
                 it must give the lease back itself"
            ),
            (_, _, Some(Contact { error: Some(error), refused: false, .. })) => {
                format!("{borrower} does not answer: {error}")
            }
            (_, _, Some(Contact { error, refused: true, .. })) => {
                format!("{borrower} refuses: {}", error.as_deref().unwrap_or_default())
            }
            (_, Some(failed), _) => format!("{borrower} cannot move it yet: {failed}"),
            (_, None, _) => format!("{borrower} is moving it"),
        }
    }

    fn host(&self) -> HostName {
        self.controller.facts().host.clone()
    }
}
