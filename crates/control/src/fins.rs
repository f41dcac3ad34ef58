use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{HostName, LeaseId};

use crate::turn::Turn;
use crate::{Message, What};

/// Leases given back whose lenders have not confirmed it yet: `mem_bor_fin` is repeated until they do.
///
/// A fin that is unconfirmed for the whole grace is dropped: a lender that heard none of it has heard nothing of the
/// lease for the whole grace either, and frees it by itself. One that comes back later asks ("ack") and is told again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fins(BTreeMap<(HostName, LeaseId), Fin>);

#[derive(Clone, Debug)]
struct Fin {
    since: Duration,
    sent: Duration,
}

impl Fins {
    /// Says `mem_bor_fin` until it is confirmed; says it once more if that is going on already.
    pub(crate) fn add(&mut self, lender: &HostName, lease: LeaseId, turn: &mut Turn<'_>) {
        let now = turn.now();
        let fin = self.0.entry((lender.clone(), lease)).or_insert_with(|| {
            turn.decide(What::Finishes { lender: lender.clone(), lease });
            Fin { since: now, sent: now }
        });
        fin.sent = now;
        turn.send(lender, Message::MemBorFin { lease });
    }

    /// Whether this fin is still unconfirmed.
    pub(crate) fn contains(&self, lender: &HostName, lease: LeaseId) -> bool {
        self.0.contains_key(&(lender.clone(), lease))
    }

    /// The lender has taken it.
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
