//! The ledger: decides the loans between groups, and the payer for each lender's scanner.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group};

use super::debts::Debts;
use super::recall::{Readings, recall, settle, up};
use super::{Account, Config, Plan, Reading, Why};
use crate::group::whole;

/// Keeps the loans between the groups of a host, period by period. The [module](super) describes
/// the rules.
#[derive(Clone, Debug)]
pub struct Ledger {
    config: Config,
    debts: Debts,
    /// For each group, the number of periods in a row without swapping.
    idle: BTreeMap<Group, u32>,
    /// For each group that lends, the group that pays for its scanner.
    payers: BTreeMap<Group, Group>,
}

impl Ledger {
    /// Returns a ledger without loans. If the caller has lost loans, the borrowers' VMs still hold
    /// those bytes. The bytes are then a deficit of the borrowers' groups, which `reprovision`
    /// takes back.
    pub fn new(config: Config) -> Self {
        Self { config, debts: Debts::default(), idle: BTreeMap::new(), payers: BTreeMap::new() }
    }

    /// Replaces the settings, from the next period on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Runs one period: decides the loans.
    ///
    /// Call it with all groups of the host, and hand out their surpluses afterwards. Of two
    /// readings of one group the first counts; a group without a reading is gone. After the step,
    /// no group lends more than its savings beyond the bytes that its VMs hold.
    pub fn step(&mut self, readings: &[Reading]) -> Plan {
        let mut order = Vec::new();
        let mut all = Readings::new();
        for reading in readings {
            all.entry(&reading.group).or_insert_with(|| {
                order.push(&reading.group);
                reading
            });
        }
        self.rest(&all);
        recall(&mut self.debts, &all, &self.config);
        self.lend(&all);
        self.charge(&all);
        Plan {
            changes: self.debts.take_changes(),
            loans: self.debts.loans(),
            accounts: order
                .into_iter()
                .filter_map(|group| all.get(group))
                .map(|one| self.account(one))
                .collect(),
        }
    }

    /// Counts the periods without swapping.
    fn rest(&mut self, all: &Readings<'_>) {
        let periods = |reading: &Reading| {
            if reading.swapped > self.config.swap {
                return 0;
            }
            self.idle.get(&reading.group).map_or(1, |periods| periods.saturating_add(1))
        };
        self.idle = all.values().map(|reading| (reading.group.clone(), periods(reading))).collect();
    }

    fn lend(&mut self, all: &Readings<'_>) {
        let step = whole(self.config.step);
        let mut borrowers: Vec<&Reading> =
            all.values().copied().filter(|one| self.may_borrow(one)).collect();
        borrowers.sort_by_key(|one| Reverse(one.swapped));
        for borrower in borrowers {
            let mut wanted = up(borrower.short, step);
            let mut lenders: Vec<(&Reading, Bytes)> = all
                .values()
                .filter(|lender| lender.group != borrower.group)
                .map(|lender| (*lender, self.spare(lender)))
                .filter(|&(_, idle)| idle >= step)
                .collect();
            let new =
                |lender: &Reading| self.debts.lent(&lender.group, &borrower.group) == Bytes::ZERO;
            lenders.sort_by_key(|&(lender, idle)| (new(lender), Reverse(idle)));
            for (lender, idle) in lenders {
                let more = wanted.min(Bytes(idle.0 / step.0 * step.0));
                wanted = wanted.saturating_sub(more);
                if more > Bytes::ZERO {
                    let why = Why::Lends { short: borrower.short, idle };
                    self.debts.lend(&lender.group, &borrower.group, more, why);
                }
            }
            // If one owner needs memory, another may be able to spare it. Then the VMs need give
            // nothing.
            settle(&mut self.debts, borrower);
        }
    }

    /// Returns whether a group may borrow. The group's loans to others must come back first.
    fn may_borrow(&self, one: &Reading) -> bool {
        let lends =
            self.debts.lent_by(&one.group).saturating_add(self.debts.awaited_by(&one.group));
        one.consents
            && one.swapped > self.config.swap
            && one.short > Bytes::ZERO
            && lends == Bytes::ZERO
    }

    /// Returns the bytes that a group can lend beyond its reserve.
    fn spare(&self, one: &Reading) -> Bytes {
        let borrows = self.debts.lent_to(&one.group).saturating_add(self.debts.owed_by(&one.group));
        let idle = self
            .idle
            .get(&one.group)
            .is_some_and(|&periods| periods >= self.config.idle_periods.max(1));
        if !one.consents || !idle || borrows > Bytes::ZERO {
            return Bytes::ZERO;
        }
        let gone = [one.handed, self.debts.lent_by(&one.group), self.debts.awaited_by(&one.group)];
        gone.into_iter().fold(one.saved, Bytes::saturating_sub).saturating_sub(self.config.keep)
    }

    /// Finds the payer for each lender's scanner: the group with the largest loan from it. The
    /// present payer stays unless another loan exceeds its loan by more than a step. Changes of
    /// account in each period would help neither group.
    fn charge(&mut self, all: &Readings<'_>) {
        let mut payers = BTreeMap::new();
        for lender in all.keys() {
            let loans = || all.keys().map(|one| (self.debts.lent(lender, one), *one));
            let Some((most, group)) = loans().filter(|&(lent, _)| lent > Bytes::ZERO).max() else {
                continue;
            };
            let stays = self.payers.get(lender).filter(|payer| {
                let lent = self.debts.lent(lender, payer);
                lent > Bytes::ZERO && most <= lent.saturating_add(whole(self.config.step))
            });
            payers.insert((*lender).clone(), stays.unwrap_or(group).clone());
        }
        self.payers = payers;
    }

    fn account(&self, one: &Reading) -> Account {
        let group = one.group.clone();
        Account {
            saved: one.saved,
            lent: self.debts.lent_by(&group),
            borrowed: self.debts.lent_to(&group),
            awaited: self.debts.awaited_by(&group),
            owed: self.debts.owed_by(&group),
            payer: self.payers.get(&group).unwrap_or(&group).clone(),
            group,
        }
    }
}
