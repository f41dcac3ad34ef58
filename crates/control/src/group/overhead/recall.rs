//! The end of loans in a period: recalls, returns, and the bytes that come back.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group};

use super::debts::Debts;
use super::{Config, Loan, Reading, Why};
use crate::group::whole;

/// The readings of the present groups, by group.
pub(super) type Readings<'a> = BTreeMap<&'a Group, &'a Reading>;

/// Recalls and returns loans, and settles the bytes that came back.
pub(super) fn recall(debts: &mut Debts, readings: &Readings<'_>, config: &Config) {
    for loan in debts.loans() {
        let (Some(lender), Some(borrower)) =
            (readings.get(&loan.lender), readings.get(&loan.borrower))
        else {
            // A borrower that is gone holds nothing. If the lender is gone, its memory is no longer
            // saved, and is a deficit of the borrower.
            debts.forget(&loan);
            continue;
        };
        if !(lender.consents && borrower.consents) {
            debts.recall(&loan, loan.lent, Why::NoConsent);
        } else if lender.swapped > config.swap {
            debts.recall(&loan, loan.lent, Why::OwnerSwaps { swapped: lender.swapped });
        }
    }
    for lender in readings.values() {
        cover(debts, lender, readings, config);
    }
    for borrower in readings.values() {
        settle(debts, borrower);
        give_back(debts, borrower, config);
    }
}

/// Limits a borrower's debt to the bytes that its VMs hold beyond their allowance.
pub(super) fn settle(debts: &mut Debts, borrower: &Reading) {
    let may = borrower.saved.saturating_add(debts.lent_to(&borrower.group));
    debts.settle(&borrower.group, borrower.handed.saturating_sub(may));
}

/// Recalls the bytes that a lender's surplus lacks, in whole steps. Borrowers that do not swap give
/// first, the largest loan first.
fn cover(debts: &mut Debts, lender: &Reading, readings: &Readings<'_>, config: &Config) {
    let used = lender.handed.saturating_add(debts.lent_by(&lender.group));
    let missing = used.saturating_sub(lender.saved);
    let mut wanted = up(missing, whole(config.step));
    let mut loans: Vec<Loan> =
        debts.loans().into_iter().filter(|loan| loan.lender == lender.group).collect();
    let swaps =
        |loan: &Loan| readings.get(&loan.borrower).is_some_and(|one| one.swapped > config.swap);
    loans.sort_by_key(|loan| (swaps(loan), std::cmp::Reverse(loan.lent)));
    for loan in loans {
        let less = loan.lent.min(wanted);
        wanted = wanted.saturating_sub(less);
        debts.recall(&loan, less, Why::SurplusFell { missing });
    }
}

/// Returns bytes that a borrower neither needs nor holds, in whole steps, the largest loan first.
fn give_back(debts: &mut Debts, borrower: &Reading, config: &Config) {
    if borrower.swapped > config.swap {
        return;
    }
    let may = borrower.saved.saturating_add(debts.lent_to(&borrower.group));
    let idle = may.saturating_sub(borrower.handed);
    let step = whole(config.step);
    let mut left = Bytes(idle.0 / step.0 * step.0);
    let mut loans: Vec<Loan> =
        debts.loans().into_iter().filter(|loan| loan.borrower == borrower.group).collect();
    loans.sort_by_key(|loan| std::cmp::Reverse(loan.lent));
    for loan in loans {
        let less = loan.lent.min(left);
        left = left.saturating_sub(less);
        debts.lower(&loan, less, Why::NotNeeded { idle });
    }
}

/// Rounds up to whole steps.
pub(super) fn up(bytes: Bytes, step: Bytes) -> Bytes {
    Bytes(bytes.0.div_ceil(step.0).saturating_mul(step.0))
}
