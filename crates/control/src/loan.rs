//! One lease that this host gave, from its setup to its end.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use aquifer_page::{Bytes, HostName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::step_context::StepContext;
use crate::{Action, LentLease, Message, What};

/// The state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoanState {
    /// The agent is setting the lease up; the borrower does not know of it yet.
    Opening,
    /// Set up, but the borrower has not shown that it knows of the lease.
    Offered,
    /// The borrower holds the lease.
    Held,
    /// The lender has asked for the lease back.
    #[serde(rename = "asked back")]
    Recalled,
    /// The agent is dropping the lease.
    Freeing,
}

impl fmt::Display for LoanState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Opening => "opening",
            Self::Offered => "offered",
            Self::Held => "held",
            Self::Recalled => "asked back",
            Self::Freeing => "freeing",
        })
    }
}

/// One lease that this host gave, for the status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LentStatus {
    /// The lease.
    #[serde(flatten)]
    pub lease: LentLease,
    /// The bytes stored in the lease.
    pub stored: Bytes,
    /// The lease's state.
    pub state: LoanState,
    /// The time of the borrower's last sign of the lease.
    pub seen: Duration,
}

#[derive(Clone, Debug)]
pub(crate) struct Loan {
    pub(crate) lease: LentLease,
    pub(crate) uris: Vec<String>,
    pub(crate) stored: Bytes,
    pub(crate) state: LoanState,
    pub(crate) seen: Duration,
    /// The time at which this host last sent the message or action that this loan waits for.
    pub(crate) sent: Duration,
    /// The time of its recall.
    pub(crate) recalled: Option<Duration>,
    /// Whether the only reason for the recall is that the borrower is no longer a peer.
    pub(crate) parted: bool,
    /// The time at which this host last ordered the record of which hosts may use the lease; `None`
    /// once it is written.
    pub(crate) unrecorded: Option<Duration>,
    /// Whether the borrower no longer holds the lease, although another host may.
    pub(crate) left: bool,
    /// The answers of the hosts to which the lease may have moved to the last question.
    pub(crate) answers: Answers,
}

/// The answers of the hosts to which a lease may have moved. A host that expects the lease takes
/// the question in, and neither takes the lease over nor denies it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    expect: BTreeSet<HostName>,
    deny: BTreeSet<HostName>,
}

impl Answers {
    /// Notes that a host took the question in. Its denial may have come before.
    pub(crate) fn took_in(&mut self, host: &HostName) {
        if !self.deny.contains(host) {
            self.expect.insert(host.clone());
        }
    }

    /// Notes that a host denied the lease.
    pub(crate) fn denied(&mut self, host: &HostName) {
        self.expect.remove(host);
        self.deny.insert(host.clone());
    }
}

impl Loan {
    /// Returns whether the lease makes this host a lender by role.
    pub(crate) fn makes_lender(&self) -> bool {
        self.lease.makes_lender()
    }

    /// Returns whether the lease is set up. One for swap then makes this host a lender.
    pub(crate) fn exists(&self) -> bool {
        self.state != LoanState::Opening
    }

    /// Returns whether its memory is on its way back.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.state, LoanState::Recalled | LoanState::Freeing)
    }

    pub(crate) fn ack(&self) -> Message {
        let LentLease { lease, bytes, request, generation, .. } = self.lease;
        Message::MemBorAck { request, lease, bytes, uris: self.uris.clone(), generation }
    }

    pub(crate) fn recall(&self) -> Message {
        let LentLease { lease, generation, .. } = self.lease;
        Message::MemLenFin { lease, generation }
    }

    pub(crate) fn send(&mut self, message: Message, ctx: &mut StepContext<'_>) {
        self.sent = ctx.now();
        ctx.send(&self.lease.borrower, message);
    }

    pub(crate) fn free(&mut self, ctx: &mut StepContext<'_>) {
        self.state = LoanState::Freeing;
        self.sent = ctx.now();
        ctx.act(Action::FreeLease { lease: self.lease.lease });
    }

    /// Notes that the borrower knows of the lease.
    pub(crate) fn seen(&mut self, now: Duration) {
        self.seen = now;
        if self.state == LoanState::Offered {
            self.state = LoanState::Held;
        }
    }

    /// Repeats the pending message or action; frees the lease when the grace is over.
    pub(crate) fn tick(&mut self, ctx: &mut StepContext<'_>) {
        let silent = ctx.now().saturating_sub(self.seen);
        let grace = ctx.config().grace;
        let due = ctx.passed(ctx.config().resend, self.sent);
        let unrecorded = self.unrecorded.filter(|_| self.state != LoanState::Freeing);
        if unrecorded.is_some_and(|at| ctx.passed(ctx.config().resend, at)) {
            self.order_record(ctx);
        }
        let asks = match self.state {
            LoanState::Opening => return,
            LoanState::Freeing if due => return self.free(ctx),
            LoanState::Freeing => return,
            LoanState::Offered | LoanState::Recalled => due,
            LoanState::Held if self.left => due,
            // The borrower of a region that has moved denies the lease, and the next host is asked.
            LoanState::Held => due && (silent >= grace / 4 || !self.lease.next.is_empty()),
        };
        // The region may be on another host, which waits for its operator.
        let asks_next = asks && !self.lease.next.is_empty() && (self.left || silent >= grace / 4);
        if asks_next && self.is_expected() {
            self.seen = ctx.now();
        }
        let silent = ctx.now().saturating_sub(self.seen);
        if silent >= grace {
            let LentLease { lease, borrower, .. } = self.lease.clone();
            ctx.decide(What::Expires { borrower, lease, stored: self.stored, silent });
            self.free(ctx);
            return;
        }
        if asks_next {
            self.ask_next(ctx);
        }
        if asks && !self.left {
            let is_recalled = self.state == LoanState::Recalled;
            self.send(if is_recalled { self.recall() } else { self.ack() }, ctx);
        }
    }

    /// Returns whether a host to which the lease may have moved took in the last question, and has
    /// not denied the lease since.
    fn is_expected(&self) -> bool {
        !self.answers.expect.is_empty()
    }
}
