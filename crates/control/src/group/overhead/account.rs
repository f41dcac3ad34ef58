//! The result of one period of lending between groups.

use std::fmt;

use aquifer_page::{Bytes, Group};
use serde::{Deserialize, Serialize};

use super::{Change, Loan};
use crate::group::Surplus;

/// The changes, loans and accounts of one period.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The changes of loans, in order.
    pub changes: Vec<Change>,
    /// All loans after those changes, by lender and borrower.
    pub loans: Vec<Loan>,
    /// One account for each group, in the order of the readings.
    pub accounts: Vec<Account>,
}

/// A group's balance in a period. `Display` writes it with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// The group.
    pub group: Group,
    /// The savings of the group's sharing.
    pub saved: Bytes,
    /// The bytes that the group lends, without recalled ones.
    pub lent: Bytes,
    /// The bytes that the group borrows, without recalled ones.
    pub borrowed: Bytes,
    /// The recalled bytes of the group's loans that have not come back yet.
    pub awaited: Bytes,
    /// The recalled bytes that the group must give back.
    pub owed: Bytes,
    /// The group that pays for the scanner's CPU time: the group itself, unless it lends.
    pub payer: Group,
}

impl Account {
    /// Returns the memory that the group can hand out to its VMs and its cache.
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
            (self.awaited, "is still to come back"),
            (self.owed, "is still to be given back"),
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
