use std::cmp::Reverse;
use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group};

use super::debts::Debts;
use super::recall::{Readings, recall, settle, up};
use super::{Account, Config, Plan, Reading, Why};
use crate::group::whole;

/// Keeps what the groups of a host lend each other, period by period. See the [module](super) for how.
#[derive(Clone, Debug)]
pub struct Ledger {
    config: Config,
    debts: Debts,
    /// For how many periods in a row a group has not swapped.
    idle: BTreeMap<Group, u32>,
    /// Who pays for the scanner of a group that lends.
    payers: BTreeMap<Group, Group>,
}

impl Ledger {
    /// One in which nothing is lent. If there were loans that the caller has forgotten, what the borrowers' VMs hold of
    /// them is a deficit of their groups, and taken back.
    pub fn new(config: Config) -> Self {
        Self { config, debts: Debts::default(), idle: BTreeMap::new(), payers: BTreeMap::new() }
    }

    /// Goes on with other settings, from the next period on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// One period: who lends whom, from now on.
    ///
    /// Call it with all groups of the host, before their surpluses are handed out; of two readings of one group the first
    /// counts, and one that is not among them is gone. After it, no group lends more than its sharing saves beyond what
    /// its VMs hold.
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

    /// Counts for how long groups have not swapped.
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
            // What one owner needs, another may have to spare: then nothing need be taken from VMs.
            settle(&mut self.debts, borrower);
        }
    }

    /// Whether a group may borrow: what it has lent comes back first.
    fn may_borrow(&self, one: &Reading) -> bool {
        let lends =
            self.debts.lent_by(&one.group).saturating_add(self.debts.awaited_by(&one.group));
        one.consents
            && one.swapped > self.config.swap
            && one.short > Bytes::ZERO
            && lends == Bytes::ZERO
    }

    /// What a group can lend beyond what it keeps.
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

    /// Finds who pays for each lender's scanner: who has most of what it lends. Who pays already goes on unless another has
    /// more by more than a step, as scanners that change accounts each period help nobody.
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
