use aquifer_page::{Bytes, Group};
use serde::{Deserialize, Serialize};

use crate::group::{ConfigError, validate_step};

/// How groups lend to each other. [`Config::validate`] says whether it makes sense. The paper names no figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is lent, and recalled, by multiples of. As VMs are given: 10 MiB.
    pub step: Bytes,
    /// What a lender keeps of what it could lend, so that not every broken copy recalls a loan. One step.
    pub keep: Bytes,
    /// Up to how much swap in a period counts as none. Zero, as everywhere in the paper.
    pub swap: Bytes,
    /// For how many periods in a row a group must not have swapped until it lends. Five, so that what one that swaps now
    /// and then has is not lent and recalled all the time.
    pub idle_periods: u32,
}

impl Default for Config {
    fn default() -> Self {
        let step = Bytes::mib(10);
        Self { step, keep: step, swap: Bytes::ZERO, idle_periods: 5 }
    }
}

impl Config {
    /// Whether these settings make sense.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate_step(self.step)
    }
}

/// What a period finds of one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Which group.
    pub group: Group,
    /// It has agreed to lend and to borrow, and to pay for whom it borrows from.
    pub consents: bool,
    /// What its own sharing saves now.
    pub saved: Bytes,
    /// What its VMs hold beyond their sizes now ([`handed`](crate::group::reprovision::handed)).
    pub handed: Bytes,
    /// Swapped by its VMs in the period, in and out.
    pub swapped: Bytes,
    /// What its surplus lacked in the last period ([`Plan::short`](crate::group::reprovision::Plan::short)).
    pub short: Bytes,
}
