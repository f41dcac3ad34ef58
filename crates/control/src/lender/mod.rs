//! The lender's half of the controller: the answer to requests (Algorithm 2).
//!
//! - `spare`: what it can lend. `recall`: what it takes back, and in which order (Algorithm 4).

mod recall;
mod spare;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use aquifer_page::{Bytes, Group, HostName, LeaseId};

use crate::ledger::Class;
use crate::loan::{Answers, Loan, LoanState};
use crate::placement::in_whole_extents;
use crate::step_context::StepContext;
use crate::{Action, Because, LentLease, LentStatus, Message, Owner, Reason, RequestId, What};

/// The number of settled requests that the lender remembers. This record keeps the lender from
/// granting a late copy of a request again. The borrower would return such a lease at once.
const REMEMBERED: usize = 256;

/// How long VMs count on memory that this host has recalled. Borrowers move some 100 MB a second to
/// a disk, and more to other lenders.
const RECALL_PATIENCE: Duration = Duration::from_secs(60);

/// A request of a borrower.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) borrower: HostName,
    pub(crate) request: RequestId,
    pub(crate) bytes: Bytes,
    pub(crate) owner: Owner,
    pub(crate) group: Group,
    pub(crate) goes_first: bool,
}

impl Wish {
    /// Returns the class of the lease, if this host grants it.
    fn class(&self) -> Class {
        if self.goes_first { Class::Mirror } else { Class::Lent }
    }

    /// Returns why this host's role keeps it from lending, if that matters to the lease.
    fn hindrance(&self, busy: Option<Reason>) -> Option<Reason> {
        busy.filter(|_| self.owner.is_swap() && !self.goes_first)
    }
}

/// How a request repeats an earlier one.
enum Repeated {
    /// It is new.
    No,
    /// It has its lease, or is about to get it.
    Answered,
    /// Its lease is on its way back.
    Rejected(Reason),
}

/// The lender's half of the controller.
#[derive(Clone, Debug, Default)]
pub(crate) struct LenderRole {
    pub(crate) loans: BTreeMap<LeaseId, Loan>,
    /// Whether this host recalls all leases and grants none.
    draining: bool,
    /// When VMs of this host last needed memory that it had lent.
    reclaimed: Option<Duration>,
    /// When this host last took back a lease that goes first.
    copies_recalled: Option<Duration>,
    settled: VecDeque<(HostName, RequestId)>,
}

impl LenderRole {
    /// Restores leases found after a restart, with their URIs. The next ticks ask their borrowers
    /// whether they still hold them.
    pub(crate) fn restore(lent: Vec<(LentLease, Vec<String>)>, lends: bool, now: Duration) -> Self {
        let loan = |(lease, uris): (LentLease, Vec<String>)| {
            let loan = Loan {
                uris,
                stored: Bytes::ZERO,
                state: LoanState::Offered,
                seen: now,
                sent: Duration::ZERO,
                recalled: None,
                parted: false,
                unrecorded: None,
                left: false,
                answers: Answers::default(),
                lease,
            };
            (loan.lease.lease, loan)
        };
        let loans = lent.into_iter().map(loan).collect();
        Self { loans, draining: !lends, ..Self::default() }
    }

    /// Returns whether no lease for swap exists or is being set up.
    pub(crate) fn is_idle(&self) -> bool {
        !self.loans.values().any(Loan::makes_lender)
    }

    /// Returns whether at least one lease for swap is set up, which makes this host a lender.
    pub(crate) fn lends(&self) -> bool {
        self.loans.values().any(|loan| loan.makes_lender() && loan.exists())
    }

    /// Returns the capacity of the leases that this host can recall, or is about to have back. It
    /// does not count on a borrower that has been silent on a recall for long.
    pub(crate) fn recallable(&self, now: Duration) -> Bytes {
        let comes = |loan: &&Loan| {
            let asked = loan.recalled.unwrap_or(now);
            loan.state != LoanState::Freeing && now.saturating_sub(asked) < RECALL_PATIENCE
        };
        self.loans.values().filter(comes).map(|loan| loan.lease.bytes).sum()
    }

    /// Returns when the oldest recall began that goes on.
    pub(crate) fn recalling_since(&self) -> Option<Duration> {
        let recalled = self.loans.values().filter(|loan| loan.state == LoanState::Recalled);
        recalled.filter_map(|loan| loan.recalled).min()
    }

    /// Handles `mem_bor_req` (Algorithm 2 lines 2-3 and 9-13). A role limits lending to swap only.
    pub(crate) fn requested(
        &mut self,
        wish: Wish,
        busy: Option<Reason>,
        ctx: &mut StepContext<'_>,
    ) {
        let busy = wish.hindrance(busy);
        match self.repeated(&wish, ctx) {
            Repeated::Answered => {}
            Repeated::Rejected(reason) => self.reject(&wish, busy, reason, ctx),
            Repeated::No => match self.objection(&wish, busy, ctx) {
                Some(reason) => self.reject(&wish, busy, reason, ctx),
                None => self.grant(wish, busy, ctx),
            },
        }
    }

    /// Answers a request that this host has granted before.
    fn repeated(&mut self, wish: &Wish, ctx: &mut StepContext<'_>) -> Repeated {
        let same = |loan: &&mut Loan| {
            loan.lease.request == wish.request && loan.lease.borrower == wish.borrower
        };
        let Some(loan) = self.loans.values_mut().find(same) else {
            let settled = (wish.borrower.clone(), wish.request);
            let is_settled = self.settled.contains(&settled);
            return if is_settled { Repeated::Rejected(Reason::Settled) } else { Repeated::No };
        };
        match loan.state {
            LoanState::Opening => Repeated::Answered,
            LoanState::Offered | LoanState::Held => {
                loan.seen = ctx.now();
                loan.send(loan.ack(), ctx);
                Repeated::Answered
            }
            LoanState::Recalled => Repeated::Rejected(Reason::Recalling),
            LoanState::Freeing => Repeated::Rejected(Reason::Settled),
        }
    }

    /// Returns why this host does not grant a new request.
    fn objection(
        &self,
        wish: &Wish,
        busy: Option<Reason>,
        ctx: &StepContext<'_>,
    ) -> Option<Reason> {
        let invalid = (!in_whole_extents(wish.bytes)).then_some(Reason::Invalid);
        let no_room = || {
            let spare = self.spare_for(wish, busy, ctx);
            (wish.bytes > spare).then_some(Reason::NoRoom)
        };
        invalid.or_else(|| self.closed(busy, wish.class(), ctx)).or_else(no_room)
    }

    fn grant(&mut self, wish: Wish, busy: Option<Reason>, ctx: &mut StepContext<'_>) {
        let spare = self.spare_for(&wish, busy, ctx);
        let (shareable, ledger) =
            (ctx.memory().shareable(ctx.config()), self.limiting(wish.class(), ctx));
        let Wish { borrower, request, bytes, owner, group, goes_first } = wish;
        let (generation, next) = (0, BTreeSet::new());
        let lease = ctx.ids.lease();
        let lease = LentLease {
            lease,
            borrower,
            owner,
            group,
            bytes,
            request,
            generation,
            next,
            goes_first,
        };
        ctx.decide(What::Grants {
            borrower: lease.borrower.clone(),
            lease: lease.lease,
            bytes,
            owner: lease.owner.clone(),
            goes_first,
            spare,
            shareable,
            ledger,
        });
        ctx.act(Action::OpenLease(lease.clone()));
        let loan = Loan {
            lease,
            uris: Vec::new(),
            stored: Bytes::ZERO,
            state: LoanState::Opening,
            seen: ctx.now(),
            sent: ctx.now(),
            recalled: None,
            parted: false,
            unrecorded: None,
            left: false,
            answers: Answers::default(),
        };
        self.loans.insert(loan.lease.lease, loan);
    }

    fn reject(&self, wish: &Wish, busy: Option<Reason>, reason: Reason, ctx: &mut StepContext<'_>) {
        let spare = self.spare_for(wish, busy, ctx);
        let limiting = || self.limiting(wish.class(), ctx);
        let ledger = (reason == Reason::NoRoom).then(limiting).flatten();
        let Wish { borrower, request, bytes, owner, goes_first, .. } = wish.clone();
        ctx.send(&borrower, Message::MemBorRej { request, spare, reason });
        ctx.decide(What::Rejects { borrower, bytes, owner, goes_first, spare, reason, ledger });
    }

    /// Offers the lease, which is set up, to the borrower (Algorithm 2 lines 11-13, Fig. 4a).
    pub(crate) fn opened(&mut self, lease: LeaseId, uris: Vec<String>, ctx: &mut StepContext<'_>) {
        if let Some(loan) = self.loans.get_mut(&lease)
            && loan.state == LoanState::Opening
        {
            loan.uris = uris;
            loan.state = LoanState::Offered;
            loan.seen = ctx.now();
            loan.send(loan.ack(), ctx);
        }
    }

    /// Rejects the request, because the agent could not set up the lease.
    pub(crate) fn open_failed(
        &mut self,
        lease: LeaseId,
        why: String,
        busy: Option<Reason>,
        ctx: &mut StepContext<'_>,
    ) {
        if self.loans.get(&lease).is_none_or(Loan::exists) {
            return;
        }
        if let Some(loan) = self.loans.remove(&lease) {
            let LentLease { borrower, request, bytes, owner, group, goes_first, .. } = loan.lease;
            ctx.decide(What::OpenFailed { borrower: borrower.clone(), lease, why });
            let wish = Wish { borrower, request, bytes, owner, group, goes_first };
            let busy = wish.hindrance(busy);
            self.reject(&wish, busy, Reason::Failed, ctx);
        }
    }

    /// Removes the lease, the memory of which is free again.
    pub(crate) fn freed(&mut self, lease: LeaseId) {
        if let Some(loan) = self.loans.remove(&lease) {
            self.settled.push_back((loan.lease.borrower, loan.lease.request));
            if self.settled.len() > REMEMBERED {
                self.settled.pop_front();
            }
        }
    }

    /// Notes that the borrower is connected to the lease.
    pub(crate) fn seen(&mut self, lease: LeaseId, now: Duration) {
        if let Some(loan) = self.loans.get_mut(&lease) {
            loan.seen(now);
        }
    }

    /// Notes that the borrower knows of the lease, because its agent has handled a message about
    /// it. If it did not hold the lease, it would send `mem_bor_fin`. The same holds for a host to
    /// which the lease may have moved.
    pub(crate) fn delivered(&mut self, to: &HostName, message: &Message, now: Duration) {
        let (Message::MemBorAck { lease, generation, .. }
        | Message::MemLenFin { lease, generation }) = message
        else {
            return;
        };
        let Some(loan) = self.loans.get_mut(lease) else { return };
        if loan.is_next(to, *generation) {
            loan.answers.took_in(to);
        } else if loan.lease.borrower == *to {
            loan.seen(now);
        }
    }

    /// Asks a host whose agent may have started again whether it still holds its leases: a host
    /// that booted has lost them. The question comes again until the host takes it in.
    pub(crate) fn ask_anew(&mut self, host: &HostName, ctx: &mut StepContext<'_>) {
        let its = |loan: &&mut Loan| loan.lease.borrower == *host && loan.state == LoanState::Held;
        for loan in self.loans.values_mut().filter(its) {
            loan.state = LoanState::Offered;
            loan.send(loan.ack(), ctx);
        }
    }

    /// Records the bytes stored in each lease.
    pub(crate) fn read(&mut self, stored: &BTreeMap<LeaseId, Bytes>) {
        for (id, loan) in &mut self.loans {
            loan.stored = stored.get(id).copied().unwrap_or_default();
        }
    }

    /// Runs the timers of all leases.
    pub(crate) fn timers(&mut self, ctx: &mut StepContext<'_>) {
        self.loans.values_mut().for_each(|loan| loan.tick(ctx));
    }

    /// Recalls all leases and grants none, until a call with `false`. That call does not undo
    /// recalls.
    pub(crate) fn drain(&mut self, on: bool, ctx: &mut StepContext<'_>) {
        self.draining = on;
        if on {
            self.recall_all(Because::Drain, ctx);
        }
    }

    /// Recalls all leases of this borrower.
    pub(crate) fn part(&mut self, borrower: &HostName, ctx: &mut StepContext<'_>) {
        self.recall_held(Because::Parted, |loan| loan.lease.borrower == *borrower, ctx);
    }

    pub(crate) fn status(&self) -> impl Iterator<Item = LentStatus> {
        self.loans.values().map(|loan| LentStatus {
            lease: loan.lease.clone(),
            stored: loan.stored,
            state: loan.state,
            seen: loan.seen,
        })
    }
}
