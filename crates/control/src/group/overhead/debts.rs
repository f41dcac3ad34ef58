//! The loans between groups, exact to the byte.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group};

use super::{Change, Loan, Why};

/// The loan of one lender to one borrower, and the recalled bytes of it that are still owed.
#[derive(Clone, Copy, Debug, Default)]
struct Debt {
    lent: Bytes,
    owed: Bytes,
}

/// All loans between groups, exact to the byte, and the changes of the period. A pair with no bytes
/// lent or owed is dropped.
#[derive(Clone, Debug, Default)]
pub(super) struct Debts {
    /// By lender and borrower.
    pairs: BTreeMap<(Group, Group), Debt>,
    changes: Vec<Change>,
}

impl Debts {
    pub fn lent_by(&self, lender: &Group) -> Bytes {
        self.sum(|(one, _)| one == lender, |debt| debt.lent)
    }

    pub fn lent_to(&self, borrower: &Group) -> Bytes {
        self.sum(|(_, one)| one == borrower, |debt| debt.lent)
    }

    pub fn awaited_by(&self, lender: &Group) -> Bytes {
        self.sum(|(one, _)| one == lender, |debt| debt.owed)
    }

    pub fn owed_by(&self, borrower: &Group) -> Bytes {
        self.sum(|(_, one)| one == borrower, |debt| debt.owed)
    }

    pub fn lent(&self, lender: &Group, borrower: &Group) -> Bytes {
        self.pairs.get(&(lender.clone(), borrower.clone())).map_or(Bytes::ZERO, |debt| debt.lent)
    }

    pub fn loans(&self) -> Vec<Loan> {
        let loan = |((lender, borrower), debt): (&(Group, Group), &Debt)| Loan {
            lender: lender.clone(),
            borrower: borrower.clone(),
            lent: debt.lent,
            owed: debt.owed,
        };
        self.pairs.iter().map(loan).collect()
    }

    /// Returns the changes since the last call.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub fn lend(&mut self, lender: &Group, borrower: &Group, more: Bytes, why: Why) {
        let debt = self.pairs.entry((lender.clone(), borrower.clone())).or_default();
        let from = debt.lent;
        debt.lent += more;
        let (lender, borrower, to) = (lender.clone(), borrower.clone(), debt.lent);
        self.changes.push(Change { lender, borrower, from, to, why });
    }

    /// Moves `less` bytes from lent to owed. [`Debts::settle`] then finds the bytes that come back
    /// at once.
    pub fn recall(&mut self, loan: &Loan, less: Bytes, why: Why) {
        if let Some(debt) = self.pairs.get_mut(&(loan.lender.clone(), loan.borrower.clone())) {
            debt.owed = debt.owed.saturating_add(less.min(debt.lent));
        }
        self.lower(loan, less, why);
    }

    /// Reduces the loan by `less` bytes that no VM holds.
    pub fn lower(&mut self, loan: &Loan, less: Bytes, why: Why) {
        let Some(debt) = self.pairs.get_mut(&(loan.lender.clone(), loan.borrower.clone())) else {
            return;
        };
        let from = debt.lent;
        debt.lent = from.saturating_sub(less);
        if debt.lent < from {
            let (lender, borrower) = (loan.lender.clone(), loan.borrower.clone());
            self.changes.push(Change { lender, borrower, from, to: debt.lent, why });
        }
        self.drop_empty();
    }

    /// Forgets the pair.
    pub fn forget(&mut self, loan: &Loan) {
        self.lower(loan, loan.lent, Why::Gone);
        self.pairs.remove(&(loan.lender.clone(), loan.borrower.clone()));
    }

    /// Limits a borrower's debt to `beyond`, the bytes that its VMs hold beyond their allowance.
    ///
    /// The returned bytes go to its lenders in the order of their names. In the end each lender
    /// gets all that it is owed.
    pub fn settle(&mut self, borrower: &Group, beyond: Bytes) {
        let mut back = self.owed_by(borrower).saturating_sub(beyond);
        for (_, debt) in self.pairs.iter_mut().filter(|((_, one), _)| one == borrower) {
            let part = debt.owed.min(back);
            debt.owed = debt.owed.saturating_sub(part);
            back = back.saturating_sub(part);
        }
        self.drop_empty();
    }

    fn drop_empty(&mut self) {
        self.pairs.retain(|_, debt| debt.lent > Bytes::ZERO || debt.owed > Bytes::ZERO);
    }

    fn sum(&self, whose: impl Fn(&(Group, Group)) -> bool, what: impl Fn(&Debt) -> Bytes) -> Bytes {
        let debts = self.pairs.iter().filter(|(pair, _)| whose(pair));
        debts.fold(Bytes::ZERO, |sum, (_, debt)| sum.saturating_add(what(debt)))
    }
}
