//! The settings of a scanner's rate.

use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::group::ConfigError;

/// A scan rate, in pages (4 KiB) per millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rate(pub u32);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages/ms", self.0)
    }
}

/// The figures that the rate follows (\[Kim14\] section 6.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Variant {
    /// None: the rate is constant (Static-X). With zero, the scanner stands still.
    Static(Rate),
    /// CPU only (Adaptive-C).
    C,
    /// CPU and swap (Adaptive-CS).
    Cs,
    /// CPU, swap and the yield of the scan (Adaptive-CSD): Algorithm 1.
    Csd,
}

/// The settings of the rate of a group's scanner; the defaults are the paper's (section 6.1).
/// [`Config::validate`] checks them.
///
/// A period is the time between two calls of [`Controller::step`](super::Controller::step), which
/// the caller chooses. The paper uses 1 s, and found that 0.1 s costs CPU and longer periods lag.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The figures that the rate follows.
    pub variant: Variant,
    /// The rise of the rate in a period (RATE-UNIT).
    pub unit: Rate,
    /// The least rate (MIN-SCAN-RATE), which is also the first.
    pub min: Rate,
    /// The highest rate (MAX-SCAN-RATE).
    pub max: Rate,
    /// The CPU use at which CPU counts as scarce, in percent of all CPU that the group may use
    /// (CPU-THRESHOLD). Default: 90, because the scanner has a lower priority than VMs anyway.
    pub cpu_percent: f64,
    /// The most swap traffic in a period that counts as none (SWAP-THRESHOLD).
    pub swap: Bytes,
    /// The savings in a period, for each VM of the group, above which scanning is worth the CPU
    /// (DEDUP-THRESHOLD).
    pub dedup_per_vm: Bytes,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            variant: Variant::Csd,
            unit: Rate(5),
            min: Rate(5),
            max: Rate(50),
            cpu_percent: 90.0,
            swap: Bytes::ZERO,
            dedup_per_vm: Bytes::mib(1),
        }
    }
}

impl Config {
    /// Checks these settings.
    ///
    /// # Errors
    /// Returns the first broken rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(0.0..=100.0).contains(&self.cpu_percent) {
            return Err(ConfigError::Cpu(self.cpu_percent));
        }
        if self.min == Rate(0) {
            return Err(ConfigError::NoMin);
        }
        if self.unit == Rate(0) {
            return Err(ConfigError::NoUnit);
        }
        if self.min > self.max {
            return Err(ConfigError::MinAboveMax { min: self.min, max: self.max });
        }
        Ok(())
    }

    /// Returns the rate within min and max. If min is above max, max wins.
    pub(super) fn within(&self, rate: Rate) -> Rate {
        rate.max(self.min).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_the_papers_and_make_sense() {
        let config = Config::default();
        assert_eq!(config.validate(), Ok(()));
        // "Nine steps from the minimum to maximum rates."
        assert_eq!((config.max.0 - config.min.0) / config.unit.0, 9);
    }

    #[test]
    fn a_setting_that_makes_no_sense_is_refused_by_name() {
        let cases = [
            (Config { cpu_percent: f64::NAN, ..Config::default() }, "cpu_percent = NaN"),
            (Config { cpu_percent: 101.0, ..Config::default() }, "cpu_percent = 101"),
            (Config { min: Rate(0), ..Config::default() }, "min is zero"),
            (Config { unit: Rate(0), ..Config::default() }, "unit is zero"),
            (
                Config { min: Rate(60), ..Config::default() },
                "min = 60 pages/ms is above max = 50 pages/ms",
            ),
        ];
        for (config, named) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn variants_are_written_as_in_the_paper() {
        for (json, variant) in [
            (r#""c""#, Variant::C),
            (r#""csd""#, Variant::Csd),
            (r#"{"static":5}"#, Variant::Static(Rate(5))),
        ] {
            assert_eq!(serde_json::from_str::<Variant>(json).unwrap(), variant);
            assert_eq!(serde_json::to_string(&variant).unwrap(), json);
        }
        let error = serde_json::from_str::<Config>(r#"{"mim": 5}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `mim`"), "{error}");
    }
}
