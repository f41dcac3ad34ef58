//! The `mem_bor_fin`s in flight, and their retries.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{HostName, LeaseId};

use crate::turn::Turn;
use crate::{Message, What};

/// Leases given back but not yet confirmed by their lenders. The controller repeats `mem_bor_fin`
/// until the lender confirms it.
///
/// The controller drops a fin that stays unconfirmed for the whole grace. A lender that heard none
/// of the repeats has not heard of the lease for the whole grace either, and frees it. A lender
/// that returns later asks by `mem_bor_ack`, and gets a new fin.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fins(BTreeMap<(HostName, LeaseId), Fin>);

#[derive(Clone, Debug)]
struct Fin {
    since: Duration,
    sent: Duration,
}

impl Fins {
    /// Sends `mem_bor_fin`, and repeats it until the lender confirms it. If it is pending already,
    /// sends it at once again.
    pub(crate) fn add(&mut self, lender: &HostName, lease: LeaseId, turn: &mut Turn<'_>) {
        let now = turn.now();
        let fin = self.0.entry((lender.clone(), lease)).or_insert_with(|| {
            turn.decide(What::Finishes { lender: lender.clone(), lease });
            Fin { since: now, sent: now }
        });
        fin.sent = now;
        turn.send(lender, Message::MemBorFin { lease });
    }

    /// Returns whether this fin is still unconfirmed.
    pub(crate) fn contains(&self, lender: &HostName, lease: LeaseId) -> bool {
        self.0.contains_key(&(lender.clone(), lease))
    }

    /// Removes the fin that the lender has confirmed.
    pub(crate) fn delivered(&mut self, lender: &HostName, lease: LeaseId) {
        self.0.remove(&(lender.clone(), lease));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn tick(&mut self, turn: &mut Turn<'_>) {
        self.0.retain(|(lender, lease), fin| {
            if turn.passed(turn.config().grace, fin.since) {
                turn.decide(What::FinDropped { lender: lender.clone(), lease: *lease });
                return false;
            }
            if turn.passed(turn.config().resend, fin.sent) {
                fin.sent = turn.now();
                turn.send(lender, Message::MemBorFin { lease: *lease });
            }
            true
        });
    }
}
