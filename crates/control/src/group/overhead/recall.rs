//! What of the loans ends in a period, and what comes back.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group};

use super::debts::Debts;
use super::{Config, Loan, Reading, Why};
use crate::group::whole;

/// The groups that are there.
pub(super) type Readings<'a> = BTreeMap<&'a Group, &'a Reading>;

/// Ends what has to end, and finds what came back.
pub(super) fn recall(debts: &mut Debts, readings: &Readings<'_>, config: &Config) {
    for loan in debts.loans() {
        let (Some(lender), Some(borrower)) =
            (readings.get(&loan.lender), readings.get(&loan.borrower))
        else {
            // A borrower that is gone holds nothing; what was of a lender that is gone is no longer saved by anybody, and a
            // deficit of the borrower's own.
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

/// A borrower owes no more than its VMs hold beyond what they may.
pub(super) fn settle(debts: &mut Debts, borrower: &Reading) {
    let may = borrower.saved.saturating_add(debts.lent_to(&borrower.group));
    debts.settle(&borrower.group, borrower.handed.saturating_sub(may));
}

/// Recalls what is missing of a lender's surplus, in whole steps: of who does not swap first, and has most of it.
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

/// Returns what a borrower neither needs nor holds, in whole steps: the largest loan first.
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

/// Rounded up to whole steps.
pub(super) fn up(bytes: Bytes, step: Bytes) -> Bytes {
    Bytes(bytes.0.div_ceil(step.0).saturating_mul(step.0))
}
