//! The settings by which a group's surplus is handed out.

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::group::{ConfigError, validate_step, whole};

/// The rule for dividing the savings (\[Kim14\] sections 4.2.2 and 6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// To VMs that swap: "utilitarianism".
    Demand,
    /// To all VMs equally: "communism".
    Fair,
    /// To each VM in proportion to its contribution: "capitalism".
    Entitlement,
}

/// The settings of the division. [`Config::validate`] checks them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The rule for dividing the surplus.
    pub policy: Policy,
    /// The bytes that a VM gets in a period. Default: 10 MiB, the paper's choice between slow help
    /// and too much of it (section 6.1, Fig. 4(b)).
    pub step: Bytes,
    /// The cache's reserve when VMs get memory. Without it, a broken copy would take back a step
    /// that the next merged page returns. Default: one step; the paper has none.
    pub keep: Bytes,
    /// The most swap traffic in a period that counts as none (SWAP-THRESHOLD: zero).
    pub swap: Bytes,
    /// The number of periods for which a guest may owe memory without giving a step of it. After
    /// that, the group's other VMs cover the debt. Default: 5, longer than a balloon takes for a
    /// step on a busy host; the paper gives no value.
    pub debt_periods: u32,
}

impl Default for Config {
    fn default() -> Self {
        let step = Bytes::mib(10);
        Self { policy: Policy::Demand, step, keep: step, swap: Bytes::ZERO, debt_periods: 5 }
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

    /// Returns the effective step: at least the least step of a balloon.
    pub(super) fn whole_step(&self) -> Bytes {
        whole(self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validation_accepts_the_defaults_and_rejects_a_tiny_step() {
        assert_eq!(Config::default().validate(), Ok(()));
        let error =
            Config { step: Bytes::kib(4), ..Config::default() }.validate().unwrap_err().to_string();
        assert_eq!(error, "step = 4KiB is too small: write at least 1MiB, for example 10MiB");
    }

    #[test]
    fn unset_keys_have_defaults_and_unknown_keys_are_refused() {
        let config: Config = serde_json::from_str(r#"{"policy": "fair", "keep": "0"}"#).unwrap();
        assert_eq!(config, Config { policy: Policy::Fair, keep: Bytes::ZERO, ..Config::default() });
        let error = serde_json::from_str::<Config>(r#"{"polcy": "fair"}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `polcy`"), "{error}");
    }
}
