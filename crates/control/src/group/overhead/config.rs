//! The settings of lending between groups, and the reading of one group.

use aquifer_page::{Bytes, Group};
use serde::{Deserialize, Serialize};

use crate::group::{ConfigError, validate_step};

/// The settings of lending between groups. [`Config::validate`] checks them. The paper gives no
/// values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The unit of loans and recalls. Default: 10 MiB, the step in which VMs get memory.
    pub step: Bytes,
    /// The reserve that a lender does not lend, so that not every broken copy recalls a loan.
    /// Default: one step.
    pub keep: Bytes,
    /// The most swap traffic in a period that counts as none. Default: zero, as in the paper.
    pub swap: Bytes,
    /// The number of periods in a row for which a group must not have swapped until it lends.
    /// Default: 5, so that memory of a group that swaps occasionally is not lent and recalled all
    /// the time.
    pub idle_periods: u32,
}

impl Default for Config {
    fn default() -> Self {
        let step = Bytes::mib(10);
        Self { step, keep: step, swap: Bytes::ZERO, idle_periods: 5 }
    }
}

impl Config {
    /// Checks these settings.
    ///
    /// # Errors
    /// Returns the first broken rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate_step(self.step)
    }
}

/// The figures of one group in one period.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// The group.
    pub group: Group,
    /// Whether the group has agreed to lend, to borrow, and to pay for the scanners of its lenders.
    pub consents: bool,
    /// The savings of the group's sharing.
    pub saved: Bytes,
    /// The bytes that the group's VMs hold beyond their sizes
    /// ([`handed`](crate::group::reprovision::handed)).
    pub handed: Bytes,
    /// Bytes swapped by the group's VMs in the period, in and out.
    pub swapped: Bytes,
    /// The bytes that the group's surplus lacked in the last period
    /// ([`Plan::short`](crate::group::reprovision::Plan::short)).
    pub short: Bytes,
}
