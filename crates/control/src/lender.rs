//! The lender's half of the controller: the answer to requests (Algorithm 2), and Algorithm 4.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use aquifer_page::{Bytes, Group, HostName, LeaseId};

use crate::ledger::{Class, Ledger};
use crate::loan::{Answers, Loan, LoanState};
use crate::placement::in_whole_extents;
use crate::step_context::{Facts, StepContext};
use crate::{
    Action, Because, Lent, LentLease, LentStatus, Message, Owner, Reason, RequestId, What, recall,
};

/// The number of settled requests that the lender remembers. This record keeps the lender from
/// granting a late copy of a request again. The borrower would return such a lease at once.
const REMEMBERED: usize = 256;

/// How long VMs count on memory that this host has recalled. Borrowers move some 100 MB a second to
/// a disk, and more to other lenders.
const RECALL_PATIENCE: Duration = Duration::from_secs(60);

/// How long a host lends nothing after its own VMs needed what it had lent: they then have taken
/// what came back.
const KEPT_FOR_VMS: Duration = Duration::from_secs(10);

/// A request of a borrower.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) borrower: HostName,
    pub(crate) request: RequestId,
    pub(crate) bytes: Bytes,
    pub(crate) owner: Owner,
    pub(crate) group: Group,
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
        !self.loans.values().any(Loan::is_for_swap)
    }

    /// Returns whether at least one lease for swap is set up, which makes this host a lender.
    pub(crate) fn lends(&self) -> bool {
        self.loans.values().any(|loan| loan.is_for_swap() && loan.exists())
    }

    /// Returns the sums over all leases. Leases being dropped are no longer a promise; M_u still
    /// includes the pages stored in them.
    pub(crate) fn lent(&self) -> Lent {
        let promised = self.loans.values().filter(|loan| loan.state != LoanState::Freeing);
        promised.fold(Lent::default(), |sum, loan| Lent {
            granted: sum.granted + loan.lease.bytes,
            stored: sum.stored + loan.stored.min(loan.lease.bytes),
        })
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

    /// Returns whether a recall goes on that may end soon. A borrower without another lender keeps
    /// its lease for long, and this host may lend again when it is no longer overloaded.
    fn is_recalling(&self, now: Duration) -> bool {
        self.loans.values().any(|loan| {
            let since = loan.recalled.unwrap_or(now);
            loan.state == LoanState::Recalled && now.saturating_sub(since) < RECALL_PATIENCE
        })
    }

    /// Returns why this host would grant nothing at present, of whatever size. `busy` is set if its
    /// role keeps it from lending.
    fn closed(&self, busy: Option<Reason>, ctx: &StepContext<'_>) -> Option<Reason> {
        if ctx.memory().total == Bytes::ZERO {
            return Some(Reason::Starting);
        }
        let overloaded = ctx.memory().overloaded(ctx.config()).then_some(Reason::Overloaded);
        let draining = self.draining.then_some(Reason::Draining);
        let needed = self.reclaimed.is_some_and(|at| !ctx.passed(KEPT_FOR_VMS, at));
        let recalling = (needed || self.is_recalling(ctx.now())).then_some(Reason::Recalling);
        draining.or(busy).or(recalling).or(overloaded)
    }

    /// Returns the bytes that this host would grant to swap at present. `busy` is set if it borrows
    /// for swap or asks.
    pub(crate) fn spare_for_swap(&self, busy: Option<Reason>, ctx: &StepContext<'_>) -> Bytes {
        self.spare(busy, ctx)
    }

    /// Returns the bytes that this host would grant to regions at present, whatever its role. What
    /// it has swapped out may come back, so that stays free.
    pub(crate) fn spare_for_regions(&self, ctx: &StepContext<'_>) -> Bytes {
        self.spare(None, ctx).saturating_sub(ctx.memory().swap_used)
    }

    fn spare_for(&self, owner: &Owner, busy: Option<Reason>, ctx: &StepContext<'_>) -> Bytes {
        match owner {
            Owner::Swap => self.spare_for_swap(busy, ctx),
            Owner::Region(_) => self.spare_for_regions(ctx),
        }
    }

    fn spare(&self, busy: Option<Reason>, ctx: &StepContext<'_>) -> Bytes {
        match self.closed(busy, ctx) {
            Some(_) => Bytes::ZERO,
            None => {
                let by_paper = ctx.memory().spare(ctx.config(), self.lent());
                by_paper.min(self.lendable(ctx.facts).spare(Class::Lent))
            }
        }
    }

    /// Returns the account of this host's memory. Leases being dropped count with the pages that
    /// are still stored in them.
    pub(crate) fn ledger(&self, facts: &Facts) -> Ledger {
        let Facts { memory, config, own, .. } = facts;
        let dropped = self.loans.values().filter(|loan| loan.state == LoanState::Freeing);
        let dropped: Bytes = dropped.map(|loan| loan.stored.min(loan.lease.bytes)).sum();
        let Lent { granted, stored } = self.lent();
        let lent = Lent { granted: granted + dropped, stored: stored + dropped };
        Ledger::new(memory, config, own, lent)
    }

    /// Returns the account that limits new leases. If an operator promised more than M_t, that is
    /// the account of what the agent's caches use: when one fills, this host is overloaded, takes
    /// its leases back, and shrinks caches.
    fn lendable(&self, facts: &Facts) -> Ledger {
        let ledger = self.ledger(facts);
        if ledger.promised_too_much() == Bytes::ZERO {
            return ledger;
        }
        let own = facts.own.with_auto_caches_as_used();
        self.ledger(&Facts { own, ..facts.clone() })
    }

    /// Returns the ledger if it, and not M_s or T_upper, limits what this host can spare.
    fn limiting(&self, ctx: &StepContext<'_>) -> Option<Ledger> {
        let ledger = self.lendable(ctx.facts);
        let by_paper = ctx.memory().spare(ctx.config(), self.lent());
        (ledger.spare(Class::Lent) < by_paper).then_some(ledger)
    }

    /// Handles `mem_bor_req` (Algorithm 2 lines 2-3 and 9-13). A role limits lending to swap only.
    pub(crate) fn requested(
        &mut self,
        wish: Wish,
        busy: Option<Reason>,
        ctx: &mut StepContext<'_>,
    ) {
        let busy = busy.filter(|_| wish.owner.is_swap());
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
            let spare = self.spare_for(&wish.owner, busy, ctx);
            (wish.bytes > spare).then_some(Reason::NoRoom)
        };
        invalid.or_else(|| self.closed(busy, ctx)).or_else(no_room)
    }

    fn grant(&mut self, wish: Wish, busy: Option<Reason>, ctx: &mut StepContext<'_>) {
        let spare = self.spare_for(&wish.owner, busy, ctx);
        let (shareable, ledger) = (ctx.memory().shareable(ctx.config()), self.limiting(ctx));
        let Wish { borrower, request, bytes, owner, group } = wish;
        let (generation, next) = (0, BTreeSet::new());
        let lease = ctx.ids.lease();
        let lease = LentLease { lease, borrower, owner, group, bytes, request, generation, next };
        ctx.decide(What::Grants {
            borrower: lease.borrower.clone(),
            lease: lease.lease,
            bytes,
            owner: lease.owner.clone(),
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
        let Wish { borrower, request, bytes, owner, .. } = wish.clone();
        let spare = self.spare_for(&owner, busy, ctx);
        let ledger = (reason == Reason::NoRoom).then(|| self.limiting(ctx)).flatten();
        ctx.send(&borrower, Message::MemBorRej { request, spare, reason });
        ctx.decide(What::Rejects { borrower, bytes, owner, spare, reason, ledger });
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
            let LentLease { borrower, request, bytes, owner, group, .. } = loan.lease;
            ctx.decide(What::OpenFailed { borrower: borrower.clone(), lease, why });
            let busy = busy.filter(|_| owner.is_swap());
            let wish = Wish { borrower, request, bytes, owner, group };
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

    /// Runs Algorithm 4 for a monitoring period. Without `mem_bor_fin` this host stays Lender
    /// (lines 1 and 2), and recalls leases if it is overloaded (lines 3 and 4).
    pub(crate) fn tick(&mut self, ctx: &mut StepContext<'_>) {
        if self.draining {
            // Leases that were being set up when the drain began.
            self.recall_all(Because::Drain, ctx);
        } else if ctx.memory().overloaded(ctx.config()) {
            self.recall(ctx);
        }
    }

    /// Recalls the fewest leases whose capacity brings `bytes` back, for VMs of this host. Leases
    /// on their way back count.
    pub(crate) fn reclaim(&mut self, bytes: Bytes, ctx: &mut StepContext<'_>) {
        self.reclaimed = Some(ctx.now());
        let (leaving, staying): (Vec<_>, Vec<_>) = self
            .loans
            .values()
            .filter(|loan| loan.exists())
            .map(|loan| (loan.is_leaving(), (loan.lease.lease, loan.lease.bytes)))
            .partition(|(is_leaving, _)| *is_leaving);
        let leaving = leaving.into_iter().map(|(_, (_, bytes))| bytes).sum();
        let staying = staying.into_iter().map(|(_, loan)| loan);
        let used = ctx.memory().used;
        for (lease, _) in recall::fewest(bytes, leaving, Bytes::ZERO, staying) {
            self.recall_one(lease, used, Because::OwnVms, ctx);
        }
    }

    /// Sends `mem_len_fin` for the fewest leases that bring M_u below T_lower M_t. On the early
    /// signal, which does not say how much is missing, it recalls one at a time. No recall starts
    /// while the leases on their way back suffice.
    fn recall(&mut self, ctx: &mut StepContext<'_>) {
        let (used, config) = (ctx.memory().used, ctx.config());
        let (upper, lower) = (ctx.memory().upper(config), ctx.memory().lower(config));
        let leaving: Bytes =
            self.loans.values().filter(|loan| loan.is_leaving()).map(|loan| loan.stored).sum();
        let expected = used.saturating_sub(leaving);
        let staying = self.loans.values().filter(|loan| loan.exists() && !loan.is_leaving());
        let mut staying: Vec<_> = staying.map(|loan| (loan.lease.lease, loan.stored)).collect();
        let chosen = if expected > upper {
            recall::fewest(used, leaving, lower, staying)
        } else if used <= upper && !self.loans.values().any(Loan::is_leaving) {
            staying.sort_by_key(|&(lease, stored)| (stored, lease));
            staying
                .pop()
                .map(|(lease, stored)| (lease, expected.saturating_sub(stored)))
                .into_iter()
                .collect()
        } else {
            Vec::new()
        };
        for (lease, expected) in chosen {
            self.recall_one(lease, expected, Because::Overload, ctx);
        }
    }

    fn recall_one(
        &mut self,
        lease: LeaseId,
        expected: Bytes,
        because: Because,
        ctx: &mut StepContext<'_>,
    ) {
        if let Some(loan) = self.loans.get_mut(&lease) {
            loan.state = LoanState::Recalled;
            loan.recalled = Some(ctx.now());
            loan.parted = because == Because::Parted;
            let (borrower, stored) = (loan.lease.borrower.clone(), loan.stored);
            ctx.decide(What::Recalls { borrower, lease, stored, expected, because });
            loan.send(loan.recall(), ctx);
        }
    }

    fn recall_all(&mut self, because: Because, ctx: &mut StepContext<'_>) {
        self.recall_held(because, |_| true, ctx);
    }

    /// Recalls all leases for swap, as a host must that borrows for swap as well.
    pub(crate) fn recall_from_swap(&mut self, because: Because, ctx: &mut StepContext<'_>) {
        self.recall_held(because, Loan::is_for_swap, ctx);
    }

    fn recall_held(
        &mut self,
        because: Because,
        which: impl Fn(&Loan) -> bool,
        ctx: &mut StepContext<'_>,
    ) {
        let held = |loan: &&Loan| {
            matches!(loan.state, LoanState::Offered | LoanState::Held) && which(loan)
        };
        let all: Vec<_> = self.loans.values().filter(held).map(|loan| loan.lease.lease).collect();
        let expected = ctx.memory().used;
        all.into_iter().for_each(|lease| self.recall_one(lease, expected, because, ctx));
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
