//! What a lender can spare, for leases and for second copies that go first.

use std::time::Duration;

use aquifer_page::Bytes;

use super::{LenderRole, RECALL_PATIENCE, Wish};
use crate::ledger::{Class, Ledger};
use crate::loan::LoanState;
use crate::step_context::{Facts, StepContext};
use crate::{Lent, Memory, Owner, Reason, Shareable};

/// How long a host lends nothing after its own VMs needed what it had lent: they then have taken
/// what came back.
const KEPT_FOR_VMS: Duration = Duration::from_secs(10);

/// How long a host takes no second copies after others needed their memory.
const KEPT_FOR_OTHERS: Duration = Duration::from_secs(60);

impl LenderRole {
    /// Returns the sums over all leases. Leases being dropped are no longer a promise; M_u still
    /// includes the pages stored in them.
    pub(crate) fn lent(&self) -> Lent {
        let promised = self.loans.values().filter(|loan| loan.state != LoanState::Freeing);
        promised.fold(Lent::default(), |sum, loan| {
            let bytes = loan.lease.bytes;
            Lent {
                granted: sum.granted + bytes,
                stored: sum.stored + loan.stored.min(bytes),
                mirror: sum.mirror + if loan.lease.goes_first { bytes } else { Bytes::ZERO },
            }
        })
    }

    /// Returns a reading, and the sums over all leases, as they are once the leases that go first
    /// are gone.
    pub(crate) fn without_copies(&self, memory: &Memory) -> (Memory, Lent) {
        let Lent { granted, stored, mirror } = self.lent();
        let first = self.loans.values().filter(|loan| loan.lease.goes_first);
        let copies: Bytes = first.map(|loan| loan.stored.min(loan.lease.bytes)).sum();
        let used = memory.used.saturating_sub(copies);
        let lent = Lent {
            granted: granted.saturating_sub(mirror),
            stored: stored.saturating_sub(copies),
            mirror: Bytes::ZERO,
        };
        (Memory { used, ..*memory }, lent)
    }

    /// Returns whether a recall goes on that may end soon. A borrower without another lender keeps
    /// its lease for long, and this host may lend again when it is no longer overloaded. The recall
    /// of leases that go first makes room for others.
    fn is_recalling(&self, class: Class, now: Duration) -> bool {
        self.loans.values().any(|loan| {
            let since = loan.recalled.unwrap_or(now);
            let hinders = class == Class::Mirror || !loan.lease.goes_first;
            let may_end = now.saturating_sub(since) < RECALL_PATIENCE;
            hinders && loan.state == LoanState::Recalled && may_end
        })
    }

    /// Returns why this host would grant nothing at present, of whatever size. `busy` is set if its
    /// role keeps it from lending.
    pub(super) fn closed(
        &self,
        busy: Option<Reason>,
        class: Class,
        ctx: &StepContext<'_>,
    ) -> Option<Reason> {
        if ctx.memory().total == Bytes::ZERO {
            return Some(Reason::Starting);
        }
        let overloaded = ctx.memory().overloaded(ctx.config()).then_some(Reason::Overloaded);
        let draining = self.draining.then_some(Reason::Draining);
        let needed = self.reclaimed.is_some_and(|at| !ctx.passed(KEPT_FOR_VMS, at));
        let first = self.copies_recalled.is_some_and(|at| !ctx.passed(KEPT_FOR_OTHERS, at));
        let needed = needed || (class == Class::Mirror && first);
        let recalling = needed || self.is_recalling(class, ctx.now());
        let recalling = recalling.then_some(Reason::Recalling);
        draining.or(busy).or(recalling).or(overloaded)
    }

    /// Returns the bytes that this host would grant to swap at present. `busy` is set if it borrows
    /// for swap or asks.
    pub(crate) fn spare_for_swap(&self, busy: Option<Reason>, ctx: &StepContext<'_>) -> Bytes {
        self.spare(busy, Class::Lent, ctx)
    }

    /// Returns the bytes that this host would grant to regions at present, whatever its role. What
    /// it has swapped out may come back, so that stays free.
    pub(crate) fn spare_for_regions(&self, ctx: &StepContext<'_>) -> Bytes {
        self.spare(None, Class::Lent, ctx).saturating_sub(ctx.memory().swap_used)
    }

    /// Returns the bytes that this host would grant at present to second copies that go first.
    pub(crate) fn spare_for_copies(&self, ctx: &StepContext<'_>) -> Bytes {
        self.spare(None, Class::Mirror, ctx).saturating_sub(ctx.memory().swap_used)
    }

    pub(super) fn spare_for(
        &self,
        wish: &Wish,
        busy: Option<Reason>,
        ctx: &StepContext<'_>,
    ) -> Bytes {
        match (&wish.owner, wish.class()) {
            (_, Class::Mirror) => self.spare_for_copies(ctx),
            (Owner::Region(_), _) => self.spare_for_regions(ctx),
            (Owner::Swap, _) => self.spare_for_swap(busy, ctx),
        }
    }

    fn spare(&self, busy: Option<Reason>, class: Class, ctx: &StepContext<'_>) -> Bytes {
        match self.closed(busy, class, ctx) {
            Some(_) => Bytes::ZERO,
            None => self.by_paper(class, ctx).min(self.lendable(ctx.facts).spare(class)),
        }
    }

    /// Returns what M_s and T_upper leave for leases of a class. All others get the memory of those
    /// that go first.
    fn by_paper(&self, class: Class, ctx: &StepContext<'_>) -> Bytes {
        let (memory, lent) = match class {
            Class::Mirror => (*ctx.memory(), self.lent()),
            _ => self.without_copies(ctx.memory()),
        };
        memory.spare(ctx.config(), lent)
    }

    /// Returns what the leases that go first have too much: others have been promised that memory.
    pub(super) fn copies_too_much(&self, ctx: &StepContext<'_>) -> Bytes {
        let (memory, lent) = (ctx.memory(), self.lent());
        let unused = lent.granted.saturating_sub(lent.stored);
        let by_threshold = (memory.used + unused).saturating_sub(memory.upper(ctx.config()));
        let by_share = match ctx.config().shareable {
            Shareable::Preconfigured { .. } => {
                lent.granted.saturating_sub(memory.shareable(ctx.config()))
            }
            Shareable::Dynamic => Bytes::ZERO,
        };
        let by_promises = self.lendable(ctx.facts).overcommitted;
        by_threshold.max(by_share).max(by_promises).min(lent.mirror)
    }

    /// Returns the account of this host's memory. Leases being dropped count with the pages that
    /// are still stored in them.
    pub(crate) fn ledger(&self, facts: &Facts) -> Ledger {
        let Facts { memory, config, own, .. } = facts;
        let dropped = self.loans.values().filter(|loan| loan.state == LoanState::Freeing);
        let dropped: Bytes = dropped.map(|loan| loan.stored.min(loan.lease.bytes)).sum();
        let Lent { granted, stored, mirror } = self.lent();
        let lent = Lent { granted: granted + dropped, stored: stored + dropped, mirror };
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
    pub(super) fn limiting(&self, class: Class, ctx: &StepContext<'_>) -> Option<Ledger> {
        let ledger = self.lendable(ctx.facts);
        (ledger.spare(class) < self.by_paper(class, ctx)).then_some(ledger)
    }
}
