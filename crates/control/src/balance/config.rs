use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

/// How the balancer of a host decides. [`Config::validate`] says whether it makes sense.
///
/// A period is the time between two calls of [`Balancer::step`](super::Balancer::step), which is the caller's to choose;
/// the defaults suit one of one to ten seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Share of what a guest uses that it shall have free on top. A quarter: a guest whose use doubles within eight periods
    /// fills it in more than two, time for a resize; and its page cache has some room.
    pub slack: f64,
    /// The least that a guest shall have free, and what is never taken from it. One section of QEMU's default: a guest
    /// that uses half a section more has still enough not to reclaim, and Linux keeps some tens of MiB for itself.
    pub least_slack: Bytes,
    /// A guest whose use has risen for three periods shall have free what it will have used in so many more, if that is more than its slack. Four: what
    /// others must give first, a section at a time, takes a few.
    pub ahead_periods: u32,
    /// For how many periods in a row a surplus must have been there until it is taken. Five: longer than what a program
    /// frees only to use it again at once, such as a build between two compilers.
    pub surplus_periods: u32,
    /// For how many periods a VM that grew gives nothing. Ten: what it grew for may take a while to come, and memory
    /// that goes to and fro costs both sides.
    pub hold_after_grow: u32,
    /// A guest counts as short of memory while its programs wait for it more than this share of the time, in percent: PSI's
    /// `some avg10`. Five: a healthy guest has less than one.
    pub pressure_percent: f64,
    /// Whether a guest that swaps, at least 1 MiB since it answered before, counts as short of memory; reading back what
    /// there is room for does not. False for guests that swap by design, to zram for example. What is in swap counts as need
    /// in any case.
    pub swap_is_need: bool,
    /// Whether a VM keeps what it does not need until another one needs it, as page cache, say. Except for one section
    /// when no section is free any more, so that who needs the next one need not wait; and except when the host itself
    /// is short. False: what lasts of a surplus always goes back to the free sections.
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

/// What the operator sets for one VM. [`Limits::validate`] says whether it makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The VM is never made smaller, and grown to it before others get anything.
    pub min: Bytes,
    /// The VM is never made larger. If it is, it shrinks to it, but keeps what it uses.
    pub max: Bytes,
    /// Its part where memory is scarce, relative to the weights of the other VMs. 0: it gets what nobody else wants and is
    /// the first to give a surplus; what it uses, and its min, it keeps.
    pub weight: u32,
    /// What the VM gets from elsewhere when it is out of memory (section III-C): sections promised to it. The balancer
    /// leaves them alone, because its caller does not count them as free.
    pub reserve: Bytes,
}

/// Why settings make no sense; the text names the keys and what to write instead.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigError {
    /// `slack` is no share.
    Slack(f64),
    /// `pressure_percent` is no percentage that PSI could exceed.
    Pressure(f64),
    /// `surplus_periods` is more than anybody can mean: as many readings of each VM are kept.
    SurplusPeriods(u32),
    /// `min` is above `max`.
    MinAboveMax {
        /// `min` as given.
        min: Bytes,
        /// `max` as given.
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
                "slack = {slack} is not a share of what a guest uses: write 0 to 10, for example 0.25"
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

/// The most of [`Config::surplus_periods`].
const MOST_PERIODS: u32 = 10_000;

impl Config {
    /// Whether these settings make sense.
    ///
    /// # Errors
    /// The first rule that is broken.
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

    /// What a guest that uses so much shall have free on top.
    pub(super) fn slack_on(&self, used: Bytes) -> Bytes {
        used.scaled(self.slack).max(self.least_slack)
    }
}

impl Limits {
    /// Whether these limits make sense together.
    ///
    /// # Errors
    /// The first rule that is broken.
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

    /// The min that counts: if nobody validated these limits, max has the last word, as it protects the other VMs.
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
    fn what_is_not_set_has_its_default_and_what_is_not_known_is_refused() {
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
