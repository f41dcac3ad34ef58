//! The operator's settings of the controller.

use std::fmt;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, Group};

use crate::Protections;
use crate::placement::whole_extents;

/// The way to compute M_s, the memory that this host may lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shareable {
    /// Eq. 1: M_s = M_t - M_r, a fixed capacity, independent of present use and of lent memory.
    Preconfigured {
        /// M_r, the memory reserved for this host's programs.
        reserved: Bytes,
    },
    /// Eq. 2: M_s = M_t - M_u, computed at each reading.
    Dynamic,
}

/// The operator's settings. [`Config::validate`] checks them.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// T_upper, a share of M_t. Above it, the host is overloaded.
    pub upper: f64,
    /// T_lower, a share of M_t. If used memory and borrowed swap together are below it, the host
    /// gives borrowed memory back.
    pub lower: f64,
    /// The way to compute M_s.
    pub shareable: Shareable,
    /// Whether this host lends. If not, it recalls the leases that it has given.
    pub lends: bool,
    /// Whether an overloaded host borrows automatically. If not, only its operator can borrow.
    pub borrows: bool,
    /// M_req, the size of one request of an overloaded host, rounded up to whole extents.
    pub request: Bytes,
    /// The most that this host borrows, all volumes together.
    pub max_borrowed: Bytes,
    /// How many copies pages that leave this host have.
    pub protection: Protections,
    /// The tenant for which an overloaded host borrows.
    pub group: Group,
    /// The time after which this host sends an unacknowledged message again.
    pub resend: Duration,
    /// The timeout of a request. After it, the borrower asks the next lender.
    pub give_up: Duration,
    /// How long a lender keeps the lease of a silent borrower. After that, it frees the lease, and
    /// the pages in it are lost.
    pub grace: Duration,
    /// How long a host waits after a round that brought nothing. Also how long it does not ask a
    /// lender that rejected it.
    pub cooldown: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            upper: 0.8,
            lower: 0.6,
            shareable: Shareable::Dynamic,
            lends: true,
            borrows: true,
            request: Bytes::gib(1),
            max_borrowed: Bytes::gib(64),
            protection: Protections::default(),
            group: Group::default(),
            resend: Duration::from_secs(1),
            give_up: Duration::from_secs(5),
            grace: Duration::from_secs(600),
            cooldown: Duration::from_secs(30),
        }
    }
}

/// An error in the configuration; the text names the keys and the values to write instead.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigError {
    /// The rule 0 < lower < upper < 1 does not hold.
    Thresholds {
        /// The given T_lower.
        lower: f64,
        /// The given T_upper.
        upper: f64,
    },
    /// `request` is zero.
    Request,
    /// `max_borrowed` is too small for one request.
    MaxBorrowed {
        /// The given `max_borrowed`.
        max_borrowed: Bytes,
        /// The given `request`.
        request: Bytes,
    },
    /// `resend` is zero, or one time is not longer than another as it must be.
    Times {
        /// The broken rule.
        rule: &'static str,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thresholds { lower, upper } => write!(
                f,
                "lower = {lower} and upper = {upper} are not thresholds: write shares of the \
                 memory with 0 < lower < upper < 1, for example lower = 0.6 and upper = 0.8"
            ),
            Self::Request => {
                write!(f, "request is zero: write how much to borrow at a time, for example 1GiB")
            }
            Self::MaxBorrowed { max_borrowed, request } => write!(
                f,
                "borrow.max = {max_borrowed} has no room for one borrow.request of {request} in \
                 whole extents of {}: raise borrow.max or lower borrow.request",
                Bytes(EXTENT_SIZE)
            ),
            Self::Times { rule } => write!(f, "the times do not fit together: {rule}"),
        }
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Returns the defaults with the times that suit a monitoring period: timers run on ticks.
    pub fn with_period(period: Duration) -> Self {
        let resend = period.max(Duration::from_secs(1));
        Self { resend, give_up: resend * 5, cooldown: period * 10, ..Self::default() }
    }

    /// Checks these settings.
    ///
    /// # Errors
    /// Returns the first broken rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (lower, upper) = (self.lower, self.upper);
        if !(0.0 < lower && lower < upper && upper < 1.0) {
            return Err(ConfigError::Thresholds { lower, upper });
        }
        if self.request == Bytes::ZERO {
            return Err(ConfigError::Request);
        }
        let (max_borrowed, request) = (self.max_borrowed, self.request);
        if whole_extents(max_borrowed) < request {
            return Err(ConfigError::MaxBorrowed { max_borrowed, request });
        }
        let rules = [
            (self.resend > Duration::ZERO, "resend must be above zero"),
            (self.give_up > self.resend, "give_up must be longer than resend"),
            (self.grace > self.give_up * 4, "grace must be longer than four times give_up"),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(ConfigError::Times { rule }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_make_sense() {
        assert_eq!(Config::default().validate(), Ok(()));
        assert_eq!(Config::with_period(Duration::from_secs(1)).validate(), Ok(()));
        assert_eq!(Config::with_period(Duration::from_millis(50)).validate(), Ok(()));
    }

    #[test]
    fn a_setting_that_makes_no_sense_is_refused_by_name() {
        let second = Duration::from_secs(1);
        let cases: [(Config, &str); 9] = [
            (Config { lower: 0.9, ..Config::default() }, "lower = 0.9"),
            (Config { upper: 1.0, ..Config::default() }, "upper = 1 "),
            (Config { upper: 1.5, ..Config::default() }, "upper = 1.5"),
            (Config { lower: f64::NAN, ..Config::default() }, "lower = NaN"),
            (Config { request: Bytes::ZERO, ..Config::default() }, "request is zero"),
            (Config { request: Bytes(u64::MAX), ..Config::default() }, "borrow.max = 64GiB"),
            (Config { max_borrowed: Bytes::mib(64), ..Config::default() }, "borrow.max = 64MiB"),
            (Config { resend: Duration::ZERO, ..Config::default() }, "resend"),
            (Config { grace: second, ..Config::default() }, "grace"),
        ];
        for (config, named) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
