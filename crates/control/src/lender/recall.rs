//! The choice of the leases that a lender recalls: Algorithm 4, and what goes first.

use aquifer_page::{Bytes, LeaseId};

use super::LenderRole;
use crate::loan::{Loan, LoanState};
use crate::step_context::StepContext;
use crate::{Because, What};

impl LenderRole {
    /// Runs Algorithm 4 for a monitoring period. Without `mem_bor_fin` this host stays Lender
    /// (lines 1 and 2), and recalls leases if it is overloaded (lines 3 and 4).
    pub(crate) fn tick(&mut self, ctx: &mut StepContext<'_>) {
        if self.draining {
            // Leases that were being set up when the drain began.
            self.recall_all(Because::Drain, ctx);
        } else {
            self.give_up_copies(ctx);
            if ctx.memory().overloaded(ctx.config()) {
                self.recall(ctx);
            }
        }
    }

    /// Recalls the fewest leases whose capacity brings `bytes` back, for VMs of this host. Leases
    /// on their way back count.
    pub(crate) fn reclaim(&mut self, bytes: Bytes, ctx: &mut StepContext<'_>) {
        self.reclaimed = Some(ctx.now());
        let capacity = |loan: &Loan| loan.lease.bytes;
        let leaving = self.loans.values().filter(|loan| loan.exists() && loan.is_leaving());
        let leaving = leaving.map(capacity).sum();
        let used = ctx.memory().used;
        for (lease, _) in self.fewest(bytes, leaving, Bytes::ZERO, capacity) {
            self.recall_one(lease, used, Because::OwnVms, ctx);
        }
    }

    /// Recalls the fewest leases that go first whose capacity others have been promised.
    fn give_up_copies(&mut self, ctx: &mut StepContext<'_>) {
        let (much, used) = (self.copies_too_much(ctx), ctx.memory().used);
        let first = self.loans.values().filter(|loan| loan.exists() && loan.lease.goes_first);
        let (leaving, staying): (Vec<_>, Vec<_>) = first.partition(|loan| loan.is_leaving());
        let leaving = leaving.into_iter().map(|loan| loan.lease.bytes).sum();
        let staying = staying.into_iter().map(|loan| (loan.lease.lease, loan.lease.bytes));
        for (lease, _) in fewest(much, leaving, Bytes::ZERO, staying) {
            self.recall_one(lease, used, Because::GoesFirst, ctx);
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
        let chosen = if expected > upper {
            self.fewest(used, leaving, lower, |loan| loan.stored)
        } else if used <= upper && !self.loans.values().any(Loan::is_leaving) {
            let order = |loan: &&Loan| (loan.lease.goes_first, loan.stored, loan.lease.lease);
            let last = self.staying().max_by_key(order);
            let chosen = last.map(|loan| (loan.lease.lease, expected.saturating_sub(loan.stored)));
            chosen.into_iter().collect()
        } else {
            Vec::new()
        };
        for (lease, expected) in chosen {
            self.recall_one(lease, expected, Because::Overload, ctx);
        }
    }

    fn staying(&self) -> impl Iterator<Item = &Loan> {
        self.loans.values().filter(|loan| loan.exists() && !loan.is_leaving())
    }

    /// Returns the fewest leases to recall, as [`fewest`] does: of those that go first, and of the
    /// others only if these do not suffice.
    fn fewest(
        &self,
        used: Bytes,
        leaving: Bytes,
        target: Bytes,
        size: impl Fn(&Loan) -> Bytes,
    ) -> Vec<(LeaseId, Bytes)> {
        let of = |goes_first| {
            let all = self.staying().filter(move |loan| loan.lease.goes_first == goes_first);
            all.map(|loan| (loan.lease.lease, size(loan)))
        };
        let mut chosen = fewest(used, leaving, target, of(true));
        let expected =
            chosen.last().map_or(used.saturating_sub(leaving), |(_, expected)| *expected);
        chosen.extend(fewest(expected, Bytes::ZERO, target, of(false)));
        chosen
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
            if loan.lease.goes_first {
                self.copies_recalled = Some(ctx.now());
            }
            loan.parted = because == Because::Parted;
            let (borrower, stored) = (loan.lease.borrower.clone(), loan.stored);
            ctx.decide(What::Recalls { borrower, lease, stored, expected, because });
            loan.send(loan.recall(), ctx);
        }
    }

    pub(super) fn recall_all(&mut self, because: Because, ctx: &mut StepContext<'_>) {
        self.recall_held(because, |_| true, ctx);
    }

    /// Recalls all leases that make this host a lender, as it must if it borrows for swap as well.
    pub(crate) fn recall_from_swap(&mut self, because: Because, ctx: &mut StepContext<'_>) {
        self.recall_held(because, Loan::makes_lender, ctx);
    }

    pub(super) fn recall_held(
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
}

/// Returns the fewest leases to recall that bring `used` to `target`. Of the sets of that size, it
/// picks one that takes little more than needed. If all leases do not suffice, it returns all.
///
/// `stored` has the bytes in each lease that is not recalled yet. `leaving` is the sum of the bytes
/// in recalled leases, which count as gone. Each returned lease comes with the use expected after
/// it.
fn fewest(
    used: Bytes,
    leaving: Bytes,
    target: Bytes,
    stored: impl IntoIterator<Item = (LeaseId, Bytes)>,
) -> Vec<(LeaseId, Bytes)> {
    let mut expected = used.saturating_sub(leaving);
    let mut left: Vec<_> = stored.into_iter().collect();
    left.sort_by_key(|&(lease, bytes)| (bytes, lease));
    let mut chosen = Vec::new();
    while expected > target {
        let needed = expected - target;
        // Ascending: the first lease that suffices alone is the smallest that does. Else the
        // largest comes nearest.
        let enough = left.partition_point(|&(_, bytes)| bytes < needed);
        if left.is_empty() {
            break;
        }
        let (lease, bytes) = left.remove(enough.min(left.len() - 1));
        expected = expected.saturating_sub(bytes);
        chosen.push((lease, expected));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(used: u64, leaving: u64, target: u64, stored: &[u64]) -> Vec<(u128, u64)> {
        let stored =
            stored.iter().enumerate().map(|(id, &mib)| (LeaseId(id as u128), Bytes::mib(mib)));
        let picked = fewest(Bytes::mib(used), Bytes::mib(leaving), Bytes::mib(target), stored);
        picked.into_iter().map(|(lease, expected)| (lease.0, expected.0 >> 20)).collect()
    }

    #[test]
    fn the_smallest_lease_that_suffices_alone_is_taken() {
        assert_eq!(chosen(900, 0, 600, &[100, 800, 300, 400]), [(2, 600)]);
    }

    #[test]
    fn several_are_taken_largest_first_where_none_suffices_alone() {
        assert_eq!(chosen(900, 0, 400, &[100, 300, 250, 400]), [(3, 500), (0, 400)]);
    }

    #[test]
    fn bytes_that_are_leaving_count_as_gone() {
        assert_eq!(chosen(900, 300, 600, &[100, 200]), []);
        assert_eq!(chosen(900, 200, 600, &[100, 200]), [(0, 600)]);
    }

    #[test]
    fn all_are_taken_even_empty_ones_where_all_do_not_suffice() {
        assert_eq!(chosen(900, 0, 100, &[0, 200]), [(1, 700), (0, 700)]);
    }
}
