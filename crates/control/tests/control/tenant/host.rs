//! Groups of one host that lend to each other.

use std::collections::BTreeMap;

use aquifer_control::group::overhead::{Account, Change, Config, Ledger, Loan, Plan, Reading};
use aquifer_page::{Bytes, Group};

use super::Tenant;

#[derive(Debug)]
pub struct Host {
    pub tenants: BTreeMap<String, Tenant>,
    /// The savings of each group's sharing, in MiB.
    pub saved: BTreeMap<String, u64>,
    /// The groups that have not agreed.
    pub refuses: Vec<String>,
    config: Config,
    ledger: Ledger,
    /// The bytes that each group lacked in the last period.
    short: BTreeMap<String, Bytes>,
}

impl Host {
    pub fn new(tenants: impl IntoIterator<Item = (&'static str, Tenant)>) -> Self {
        let config = Config::default();
        assert_eq!(config.validate(), Ok(()));
        let tenants: BTreeMap<String, Tenant> =
            tenants.into_iter().map(|(name, tenant)| (name.to_owned(), tenant)).collect();
        let saved = tenants.iter().map(|(name, tenant)| (name.clone(), tenant.saved)).collect();
        let ledger = Ledger::new(config.clone());
        Self { tenants, saved, refuses: Vec::new(), config, ledger, short: BTreeMap::new() }
    }

    pub fn tenant(&mut self, name: &str) -> &mut Tenant {
        self.tenants.get_mut(name).expect("there is such a group")
    }

    pub fn saves(&mut self, name: &str, saved: u64) {
        self.saved.insert(name.to_owned(), saved);
    }

    fn readings(&self) -> Vec<Reading> {
        let reading = |(name, tenant): (&String, &Tenant)| Reading {
            group: name.parse().expect("the test names it well"),
            consents: !self.refuses.contains(name),
            saved: Bytes::mib(self.saved[name]),
            handed: Bytes::mib(tenant.handed()),
            swapped: Bytes::mib(tenant.swaps()),
            short: self.short.get(name).copied().unwrap_or_default(),
        };
        self.tenants.iter().map(reading).collect()
    }

    /// Runs one period: loans first, then each group hands out its surplus.
    pub fn period(&mut self) -> Plan {
        let readings = self.readings();
        let plan = self.ledger.step(&readings);
        check(&self.config, &readings, &plan);
        for (tenant, account) in self.tenants.values_mut().zip(&plan.accounts) {
            tenant.saved = account.surplus().bytes.0 >> 20;
            tenant.awaited = account.surplus().awaited.0 >> 20;
            let short = tenant.period().short;
            self.short.insert(account.group.to_string(), short);
        }
        plan
    }

    pub fn periods(&mut self, periods: usize) -> Vec<Change> {
        (0..periods).flat_map(|_| self.period().changes).collect()
    }

    /// Returns the MiB that all VMs hold, and the MiB that all sharing saves.
    pub fn held_of(&self) -> (u64, u64) {
        let saved = self.tenants.keys().map(|name| self.saved[name]).sum();
        (self.tenants.values().map(Tenant::handed).sum(), saved)
    }
}

pub fn account<'a>(plan: &'a Plan, group: &str) -> &'a Account {
    plan.accounts.iter().find(|one| one.group.as_str() == group).expect("each group has one")
}

/// Writes loans in a short form to compare: `bt>wc 30+10`, where 10 MiB are owed.
pub fn loans(plan: &Plan) -> Vec<String> {
    let mib = |bytes: Bytes| bytes.0 >> 20;
    plan.loans
        .iter()
        .map(|one| format!("{}>{} {}+{}", one.lender, one.borrower, mib(one.lent), mib(one.owed)))
        .collect()
}

/// Checks the invariants of each plan, for any readings.
pub fn check(config: &Config, readings: &[Reading], plan: &Plan) {
    let by_name: BTreeMap<&Group, &Reading> =
        readings.iter().map(|one| (&one.group, one)).collect();
    assert_eq!(plan.accounts.len(), readings.len(), "one account each");
    let sum = |whose: &dyn Fn(&Loan) -> bool, what: &dyn Fn(&Loan) -> Bytes| -> Bytes {
        plan.loans.iter().filter(|loan| whose(loan)).map(what).sum()
    };
    for loan in &plan.loans {
        let (lender, borrower) = (by_name[&loan.lender], by_name[&loan.borrower]);
        assert_ne!(loan.lender, loan.borrower);
        assert!(
            loan.lent > Bytes::ZERO || loan.owed > Bytes::ZERO,
            "an empty pair is kept: {loan:?}"
        );
        if loan.lent > Bytes::ZERO {
            assert!(lender.consents && borrower.consents, "{loan:?} without consent");
            assert!(lender.swapped <= config.swap, "{loan:?} though its owner swaps");
            assert_eq!(loan.lent.0 % config.step.0, 0, "{loan:?}");
        }
    }
    for (account, reading) in plan.accounts.iter().zip(readings) {
        let group = &account.group;
        assert_eq!((group, account.saved), (&reading.group, reading.saved));
        assert_eq!(account.lent, sum(&|loan| loan.lender == *group, &|loan| loan.lent));
        assert_eq!(account.awaited, sum(&|loan| loan.lender == *group, &|loan| loan.owed));
        assert_eq!(account.borrowed, sum(&|loan| loan.borrower == *group, &|loan| loan.lent));
        assert_eq!(account.owed, sum(&|loan| loan.borrower == *group, &|loan| loan.owed));
        let idle = reading.saved.saturating_sub(reading.handed);
        assert!(account.lent <= idle, "{account} lends more than {idle}");
        assert!(
            account.lent == Bytes::ZERO || account.borrowed == Bytes::ZERO,
            "{account} does both"
        );
        // A group owes no more than its VMs hold beyond their allowance.
        let may = reading.saved.saturating_add(account.borrowed);
        assert!(account.owed <= reading.handed.saturating_sub(may), "{account}");
        if account.lent > Bytes::ZERO {
            let pays = |loan: &Loan| loan.lender == *group && loan.borrower == account.payer;
            assert!(
                plan.loans.iter().any(|loan| pays(loan) && loan.lent > Bytes::ZERO),
                "{account}"
            );
        } else {
            assert_eq!(account.payer, *group, "{account}");
        }
    }
    // The sum of all surpluses is the sum of all savings: loans are exact to the byte.
    let all = plan.accounts.iter().map(|one| i128::from(one.surplus().bytes.0)).sum::<i128>();
    assert_eq!(all, readings.iter().map(|one| i128::from(one.saved.0)).sum());
    for change in &plan.changes {
        assert_ne!(change.from, change.to, "{change}");
    }
    let json = serde_json::to_string(plan).expect("a plan can be written");
    assert_eq!(&serde_json::from_str::<Plan>(&json).expect("and read again"), plan);
}
