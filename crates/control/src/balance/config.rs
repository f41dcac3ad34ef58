//! The settings of the balancer, and the operator's limits for one VM.

use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

/// The balancer's settings. [`Config::validate`] checks them.
///
/// A period is the time between two calls of [`Balancer::step`](super::Balancer::step). The caller
/// chooses it; the defaults suit one to ten seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The free memory that a guest gets on top of its use, as a share of that use. Default: 0.25.
    /// If a guest's use doubles within eight periods, it fills this slack in more than two, time
    /// for a resize. The slack also leaves room for the page cache.
    pub slack: f64,
    /// The least free memory of a guest, which the balancer never takes. Default: one section of
    /// QEMU's default size. If its use grows by half a section, the guest then still need not
    /// reclaim. Linux keeps some tens of MiB for itself.
    pub least_slack: Bytes,
    /// The periods that the balancer looks ahead when a guest's use has risen for three periods.
    /// The guest gets free memory for that rise if it exceeds the slack. Default: 4, because others
    /// give a section at a time, which takes a few periods.
    pub ahead_periods: u32,
    /// The number of periods in a row for which a surplus must last until the balancer takes it.
    /// Default: 5, longer than a program frees memory that it soon reuses, such as a build between
    /// two compilers.
    pub surplus_periods: u32,
    /// The number of periods for which a VM that grew gives nothing. Default: 10. The load that it
    /// grew for may take a while to come, and memory that moves back and forth costs both VMs.
    pub hold_after_grow: u32,
    /// The share of time, in percent, above which stalls on memory (PSI's `some avg10`) mean that a
    /// guest is short of memory. Default: 5; a healthy guest has less than 1.
    pub pressure_percent: f64,
    /// Whether a guest that swaps at least 1 MiB between two answers counts as short of memory.
    /// Swap-in that the guest has room for does not count. Set it to false for guests that swap by
    /// design, for example to zram. Swapped-out memory counts as need in either case.
    pub swap_is_need: bool,
    /// Whether a VM keeps its surplus, for example as page cache, until another VM needs it. Two
    /// exceptions: when no section is free, a VM gives one section, so that the next growth need
    /// not wait. When the host itself is short, VMs give all lasting surplus. False: a lasting
    /// surplus always returns to the free sections.
    pub keep_surplus: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slack: 0.25,
            least_slack: Bytes::mib(128),
            ahead_periods: 4,
            surplus_periods: 5,
            hold_after_grow: 10,
            pressure_percent: 5.0,
            swap_is_need: true,
            keep_surplus: true,
        }
    }
}

/// The operator's limits for one VM. [`Limits::validate`] checks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The least size. The VM never shrinks below it, and grows to it before other VMs grow.
    pub min: Bytes,
    /// The largest size. The VM never grows beyond it. A larger VM shrinks to it, but keeps the
    /// memory that it uses.
    pub max: Bytes,
    /// The VM's weight in the division of scarce memory, relative to the other VMs. With 0 it gets
    /// only memory that no other VM wants, and gives its surplus first. The VM still keeps the
    /// memory that it uses, and its min.
    pub weight: u32,
    /// The sections promised to this VM for when it is out of memory (\[Bielski18\] III-C). The
    /// balancer leaves them alone, because its caller does not count them as free.
    pub reserve: Bytes,
}

/// An error in the settings; the text names the keys and the values to write instead.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigError {
    /// `slack` is not between 0 and 10.
    Slack(f64),
    /// `pressure_percent` is not between 0 and 100.
    Pressure(f64),
    /// `surplus_periods` is above 10,000. The balancer keeps as many readings of each VM.
    SurplusPeriods(u32),
    /// `min` is above `max`.
    MinAboveMax {
        /// The given `min`.
        min: Bytes,
        /// The given `max`.
        max: Bytes,
    },
    /// `max` is zero.
    NoMax,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slack(slack) => write!(
                f,
                "slack = {slack} is not a share of a guest's use: write 0 to 10, for example 0.25"
            ),
            Self::Pressure(percent) => {
                write!(
                    f,
                    "pressure_percent = {percent}: write 0 to 100, for example 5 (100 turns it off)"
                )
            }
            Self::SurplusPeriods(periods) => {
                write!(
                    f,
                    "surplus_periods = {periods}: write at most {MOST_PERIODS}, for example 5"
                )
            }
            Self::MinAboveMax { min, max } => {
                write!(f, "min = {min} is above max = {max}: raise max or lower min")
            }
            Self::NoMax => {
                f.write_str("max is zero: write the most that the VM may have, for example 4GiB")
            }
        }
    }
}

impl std::error::Error for ConfigError {}

/// The largest valid [`Config::surplus_periods`].
const MOST_PERIODS: u32 = 10_000;

impl Config {
    /// Checks these settings.
    ///
    /// # Errors
    /// Returns the first broken rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(0.0..=10.0).contains(&self.slack) {
            return Err(ConfigError::Slack(self.slack));
        }
        if !(0.0..=100.0).contains(&self.pressure_percent) {
            return Err(ConfigError::Pressure(self.pressure_percent));
        }
        if self.surplus_periods > MOST_PERIODS {
            return Err(ConfigError::SurplusPeriods(self.surplus_periods));
        }
        Ok(())
    }

    /// Returns the free memory that a guest of this use gets on top.
    pub(super) fn slack_on(&self, used: Bytes) -> Bytes {
        used.scaled(self.slack).max(self.least_slack)
    }
}

impl Limits {
    /// Checks these limits.
    ///
    /// # Errors
    /// Returns the first broken rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self { min, max, .. } = *self;
        if max == Bytes::ZERO {
            return Err(ConfigError::NoMax);
        }
        if min > max {
            return Err(ConfigError::MinAboveMax { min, max });
        }
        Ok(())
    }

    /// Returns the min that counts. If `min` is above `max`, `max` wins, because it protects the
    /// other VMs.
    pub(super) fn least(&self) -> Bytes {
        self.min.min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_make_sense() {
        assert_eq!(Config::default().validate(), Ok(()));
    }

    #[test]
    fn a_setting_that_makes_no_sense_is_refused_by_name() {
        let cases: [(Config, &str); 5] = [
            (Config { slack: -0.1, ..Config::default() }, "slack = -0.1"),
            (Config { slack: f64::NAN, ..Config::default() }, "slack = NaN"),
            (Config { pressure_percent: 101.0, ..Config::default() }, "pressure_percent = 101"),
            (Config { pressure_percent: f64::NAN, ..Config::default() }, "pressure_percent = NaN"),
            (
                Config { surplus_periods: u32::MAX, ..Config::default() },
                "surplus_periods = 4294967295",
            ),
        ];
        for (config, named) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn limits_that_leave_no_size_are_refused_and_weight_zero_is_not() {
        let limits =
            Limits { min: Bytes::gib(1), max: Bytes::gib(2), weight: 0, reserve: Bytes::ZERO };
        assert_eq!(limits.validate(), Ok(()));
        let error = Limits { min: Bytes::gib(3), ..limits }.validate().unwrap_err().to_string();
        assert_eq!(error, "min = 3GiB is above max = 2GiB: raise max or lower min");
        let none = Limits { min: Bytes::ZERO, max: Bytes::ZERO, ..limits };
        assert_eq!(none.validate(), Err(ConfigError::NoMax));
    }

    #[test]
    fn unset_keys_have_defaults_and_unknown_keys_are_refused() {
        let config: Config =
            serde_json::from_str(r#"{"least_slack": "64MiB", "keep_surplus": false}"#).unwrap();
        assert_eq!(
            config,
            Config { least_slack: Bytes::mib(64), keep_surplus: false, ..Config::default() }
        );
        let error = serde_json::from_str::<Config>(r#"{"slak": 0.5}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `slak`"), "{error}");
    }
}
