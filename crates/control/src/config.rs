use std::fmt;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, Group};

use crate::placement::whole_extents;

/// How M_s, the memory that this host may lend, is reckoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shareable {
    /// Eq. 1: M_s = M_t - M_r. A fixed capacity, however much of it is lent already.
    Preconfigured {
        /// M_r: kept for this host's own programs.
        reserved: Bytes,
    },
    /// Eq. 2: M_s = M_t - M_u, anew at each reading.
    Dynamic,
}

/// What the operator sets. [`Config::validate`] says whether it makes sense.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// T_upper, a share of M_t: above it the host is overloaded.
    pub upper: f64,
    /// T_lower, a share of M_t: below it (used memory and borrowed swap together) what was borrowed goes back.
    pub lower: f64,
    /// How M_s is reckoned.
    pub shareable: Shareable,
    /// Whether this host lends. One that does not asks back what it has lent.
    pub lends: bool,
    /// Whether an overloaded host borrows by itself, or only its operator for it.
    pub borrows: bool,
    /// M_req: what an overloaded host asks for at a time, rounded up to whole extents.
    pub request: Bytes,
    /// The most that this host borrows, all volumes together.
    pub max_borrowed: Bytes,
    /// The tenant in whose name an overloaded host borrows.
    pub group: Group,
    /// An unsettled message is sent again after this long.
    pub resend: Duration,
    /// A lender that has not answered a request for this long is given up, and the next one asked.
    pub give_up: Duration,
    /// How long a lender keeps the lease of a borrower that gives no sign. The pages in it are lost afterwards.
    pub grace: Duration,
    /// How long a host that nobody lent to waits before it asks again, and leaves a lender alone that rejected it.
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
            group: Group::default(),
            resend: Duration::from_secs(1),
            give_up: Duration::from_secs(5),
            grace: Duration::from_secs(600),
            cooldown: Duration::from_secs(30),
        }
    }
}

/// Why a configuration makes no sense; the text names the keys and what to write instead.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigError {
    /// Not 0 < lower < upper <= 1.
    Thresholds {
        /// T_lower as given.
        lower: f64,
        /// T_upper as given.
        upper: f64,
    },
    /// `request` is zero.
    Request,
    /// `max_borrowed` has no room for one request.
    MaxBorrowed {
        /// `max_borrowed` as given.
        max_borrowed: Bytes,
        /// `request` as given.
        request: Bytes,
    },
    /// `resend` is zero, or a time that must be longer than another is not.
    Times {
        /// What must hold.
        rule: &'static str,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thresholds { lower, upper } => write!(
                f,
                "lower = {lower} and upper = {upper} are not thresholds: write shares of the memory with 0 < lower < upper <= 1, \
                 for example lower = 0.6 and upper = 0.8"
            ),
            Self::Request => {
                write!(f, "request is zero: write how much to borrow at a time, for example 1GiB")
            }
            Self::MaxBorrowed { max_borrowed, request } => write!(
                f,
                "borrow.max = {max_borrowed} has no room for one borrow.request of {request} in whole extents of {}: \
                 raise borrow.max or lower borrow.request",
                Bytes(EXTENT_SIZE)
            ),
            Self::Times { rule } => write!(f, "the times do not fit together: {rule}"),
        }
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Whether these settings make sense together.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (lower, upper) = (self.lower, self.upper);
        if !(0.0 < lower && lower < upper && upper <= 1.0) {
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
    }

    #[test]
    fn a_setting_that_makes_no_sense_is_refused_by_name() {
        let second = Duration::from_secs(1);
        let cases: [(Config, &str); 8] = [
            (Config { lower: 0.9, ..Config::default() }, "lower = 0.9"),
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
