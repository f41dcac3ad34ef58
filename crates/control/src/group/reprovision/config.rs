use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::group::{ConfigError, validate_step, whole};

/// Who gets what sharing saves (Groups, sections 4.2.2 and 6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// VMs that swap: "utilitarianism".
    Demand,
    /// All VMs the same: "communism".
    Fair,
    /// Each VM in proportion to what it contributes: "capitalism".
    Entitlement,
}

/// How a group's surplus is handed out. [`Config::validate`] says whether it makes sense.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Who gets it.
    pub policy: Policy,
    /// How much a VM gets in a period. 10 MiB: the paper's choice between slow help and too much of it (section 6.1,
    /// Fig. 4(b)).
    pub step: Bytes,
    /// What is left to the cache when VMs are given something, so that not every broken copy takes a step back that the
    /// next merged page returns. One step; the paper has none.
    pub keep: Bytes,
    /// Up to how much swap in a period counts as none (SWAP-THRESHOLD: zero).
    pub swap: Bytes,
    /// For how many periods a guest may owe memory without giving a step of it, until the group's other VMs have to
    /// cover it. Five: longer than a balloon takes for a step on a busy host. The paper is silent.
    pub patience: u32,
}

impl Default for Config {
    fn default() -> Self {
        let step = Bytes::mib(10);
        Self { policy: Policy::Demand, step, keep: step, swap: Bytes::ZERO, patience: 5 }
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

    /// The step to go by: if nobody validated it, no less than balloons can.
    pub(super) fn whole_step(&self) -> Bytes {
        whole(self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_make_sense_and_a_step_that_no_balloon_makes_does_not() {
        assert_eq!(Config::default().validate(), Ok(()));
        let error =
            Config { step: Bytes::kib(4), ..Config::default() }.validate().unwrap_err().to_string();
        assert_eq!(error, "step = 4KiB is too small: write at least 1MiB, for example 10MiB");
    }

    #[test]
    fn what_is_not_set_has_its_default_and_what_is_not_known_is_refused() {
        let config: Config = serde_json::from_str(r#"{"policy": "fair", "keep": "0"}"#).unwrap();
        assert_eq!(config, Config { policy: Policy::Fair, keep: Bytes::ZERO, ..Config::default() });
        let error = serde_json::from_str::<Config>(r#"{"polcy": "fair"}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `polcy`"), "{error}");
    }
}
