use std::fmt;

use aquifer_page::{Bytes, Group};
use serde::{Deserialize, Serialize};

use super::{Change, Loan};
use crate::group::Surplus;

/// What is to be done in a period, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What changed of what is lent, in this order.
    pub changes: Vec<Change>,
    /// All loans after that, by lender and borrower.
    pub loans: Vec<Loan>,
    /// One for each group, in the order of the readings.
    pub accounts: Vec<Account>,
}

/// Where a group stands in a period. `Display` says it with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Which group.
    pub group: Group,
    /// What its own sharing saves.
    pub saved: Bytes,
    /// What it lends of it, without what it has recalled.
    pub lent: Bytes,
    /// What it has borrowed, without what was recalled.
    pub borrowed: Bytes,
    /// What of its loans was recalled and is not back yet.
    pub awaited: Bytes,
    /// What it has to give back.
    pub owed: Bytes,
    /// To which group's CPU account its scanner is charged: itself, unless it lends.
    pub payer: Group,
}

impl Account {
    /// What the group has to hand out to its VMs and its cache.
    pub fn surplus(&self) -> Surplus {
        let bytes = self.saved.saturating_sub(self.lent).saturating_add(self.borrowed);
        Surplus { bytes, awaited: self.awaited }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, saved, payer, .. } = self;
        write!(f, "{group} has {} to hand out: sharing saves {saved}", self.surplus().bytes)?;
        let parts = [
            (self.lent, "is lent"),
            (self.borrowed, "is borrowed"),
            (self.awaited, "has still to come back"),
            (self.owed, "has still to be given back"),
        ];
        for (bytes, what) in parts.into_iter().filter(|&(bytes, _)| bytes > Bytes::ZERO) {
            write!(f, ", {bytes} {what}")?;
        }
        if payer != group {
            write!(f, "; {payer} pays for its scanner")?;
        }
        Ok(())
    }
}
