//! A loan between two groups, and a change of it.

use std::fmt;

use aquifer_page::{Bytes, Group};
use serde::{Deserialize, Serialize};

/// One group's loan to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// The owner of the memory.
    pub lender: Group,
    /// The group that may use it.
    pub borrower: Group,
    /// The bytes lent, without recalled ones.
    pub lent: Bytes,
    /// The recalled bytes that the borrower's VMs still hold.
    pub owed: Bytes,
}

/// One change of a loan. `Display` writes it as a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The owner of the memory.
    pub lender: Group,
    /// The group that may use it.
    pub borrower: Group,
    /// The bytes lent until this change.
    pub from: Bytes,
    /// The bytes lent after it.
    pub to: Bytes,
    /// The reason.
    pub why: Why,
}

/// The reason why a loan changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// The loan grows: the borrower swaps and has nothing left.
    Lends {
        /// The bytes that the borrower lacks for the next steps of its VMs.
        short: Bytes,
        /// The bytes that the lender has beyond its reserve.
        idle: Bytes,
    },
    /// Recalled: the owner's VMs swap.
    OwnerSwaps {
        /// Bytes swapped in the period.
        swapped: Bytes,
    },
    /// Recalled: the savings of the owner's sharing no longer cover the loan.
    SurplusFell {
        /// The missing bytes.
        missing: Bytes,
    },
    /// Recalled: one of the two groups no longer agrees.
    NoConsent,
    /// Returned: the borrower's VMs do not hold it, and do not swap.
    NotNeeded {
        /// The bytes that the borrower has left.
        idle: Bytes,
    },
    /// One of the two groups is gone, and with it the loan.
    Gone,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lender, borrower, from, to, why } = self;
        write!(f, "{lender} lends {borrower} {to} instead of {from}: ")?;
        match why {
            Why::Lends { short, idle } => {
                write!(f, "{borrower} swaps and lacks {short}, {lender} can spare {idle}")
            }
            Why::OwnerSwaps { swapped } => {
                write!(f, "{lender} needs it, its VMs swapped {swapped}")
            }
            Why::SurplusFell { missing } => {
                write!(f, "{lender}'s sharing saves {missing} too little for it")
            }
            Why::NoConsent => f.write_str("one of the two groups no longer agrees to it"),
            Why::NotNeeded { idle } => write!(f, "{borrower} does not swap and has {idle} left"),
            Why::Gone => f.write_str("one of the two groups is gone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_says_its_numbers_and_goes_through_json_and_back() {
        let mib = Bytes::mib;
        let cases = [
            (
                Why::Lends { short: mib(30), idle: mib(400) },
                "bt lends wc 30MiB instead of 10MiB: wc swaps and lacks 30MiB, bt can spare 400MiB",
            ),
            (
                Why::SurplusFell { missing: mib(7) },
                "bt lends wc 30MiB instead of 10MiB: bt's sharing saves 7MiB too little for it",
            ),
        ];
        for (why, said) in cases {
            let [lender, borrower] = ["bt", "wc"].map(|name| name.parse().unwrap());
            let change = Change { lender, borrower, from: mib(10), to: mib(30), why };
            assert_eq!(change.to_string(), said);
            let json = serde_json::to_string(&change).unwrap();
            assert_eq!(serde_json::from_str::<Change>(&json).unwrap(), change, "{json}");
        }
    }
}
