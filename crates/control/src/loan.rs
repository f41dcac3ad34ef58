//! One lease that this host gave, from its setting up to its end.

use std::time::Duration;

use aquifer_page::Bytes;
use serde::Serialize;

use crate::turn::Turn;
use crate::{Action, LentLease, Message, What};

/// Where a lease is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LoanState {
    /// Being set up; the borrower does not know of it yet.
    Opening,
    /// Set up, but the borrower has not shown that it knows.
    Offered,
    /// Held by the borrower.
    Held,
    /// Asked back.
    Recalled,
    /// Being dropped.
    Freeing,
}

/// For the status: one lease that this host gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LentStatus {
    /// The lease.
    #[serde(flatten)]
    pub lease: LentLease,
    /// What is stored in it.
    pub stored: Bytes,
    /// Where it is in its life.
    pub state: LoanState,
    /// When the borrower last gave a sign of it.
    pub seen: Duration,
}

#[derive(Clone, Debug)]
pub(crate) struct Loan {
    pub(crate) lease: LentLease,
    pub(crate) uris: Vec<String>,
    pub(crate) stored: Bytes,
    pub(crate) state: LoanState,
    pub(crate) seen: Duration,
    /// When the last message or action that this loan waits for went out.
    pub(crate) sent: Duration,
}

impl Loan {
    /// Set up, so that it makes this host a lender.
    pub(crate) fn exists(&self) -> bool {
        self.state != LoanState::Opening
    }

    pub(crate) fn ack(&self) -> Message {
        let LentLease { lease, bytes, request, .. } = self.lease;
        Message::MemBorAck { request, lease, bytes, uris: self.uris.clone() }
    }

    pub(crate) fn send(&mut self, message: Message, turn: &mut Turn<'_>) {
        self.sent = turn.now();
        turn.send(&self.lease.borrower, message);
    }

    pub(crate) fn free(&mut self, turn: &mut Turn<'_>) {
        self.state = LoanState::Freeing;
        self.sent = turn.now();
        turn.act(Action::FreeLease { lease: self.lease.lease });
    }

    /// The borrower knows of the lease.
    pub(crate) fn seen(&mut self, now: Duration) {
        self.seen = now;
        if self.state == LoanState::Offered {
            self.state = LoanState::Held;
        }
    }

    /// Sends again what is not settled; frees the lease when the grace is over.
    pub(crate) fn tick(&mut self, turn: &mut Turn<'_>) {
        let silent = turn.now().saturating_sub(self.seen);
        let grace = turn.config().grace;
        let due = turn.passed(turn.config().resend, self.sent);
        let asks = match self.state {
            LoanState::Opening => return,
            LoanState::Freeing if due => return self.free(turn),
            LoanState::Freeing => return,
            LoanState::Offered | LoanState::Recalled => due,
            LoanState::Held => due && silent >= grace / 4,
        };
        if silent >= grace {
            let LentLease { lease, borrower, .. } = self.lease.clone();
            turn.decide(What::Expires { borrower, lease, stored: self.stored, silent });
            self.free(turn);
        } else if asks && self.state == LoanState::Recalled {
            self.send(Message::MemLenFin { lease: self.lease.lease }, turn);
        } else if asks {
            self.send(self.ack(), turn);
        }
    }
}
