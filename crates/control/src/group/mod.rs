//! A tenant's group of VMs on one host: the rate of the scan for equal pages, and the division of
//! the savings.
//!
//! After \[Kim14\]. There are three machines. The caller calls each once a period (1 s in the
//! paper, section 6.1) with the period's figures, and carries out the result:
//! - [`scan_rate`] (section 4.2.1, Algorithm 1) sets the pages per millisecond of a group's
//!   scanner.
//! - [`reprovision`] (sections 4.2.2 and 4.2.3) gives the savings to the group's VMs by balloon,
//!   and the rest to its secondary cache.
//! - [`overhead`] (section 7.1) lends one group's idle memory to another, which pays for the
//!   lender's scanner.
//!
//! [`agreements`] decides how all hosts get a group's agreement.
//!
//! # In a period
//! The caller first calls [`overhead::Ledger::step`] for all groups of the host, if any lends. An
//! owner that needs its memory gets it from borrowers, not from its own VMs. Then, for each group,
//! the caller calls [`reprovision::Reprovisioner::step`] with the [`Surplus`] of its account, and
//! [`scan_rate::Controller::step`]. If another group pays for the scanner, that step takes the CPU
//! and swap figures of the payer (section 7.2).

use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

pub mod agreements;
pub mod overhead;
pub mod reprovision;
pub mod scan_rate;

/// The memory that a group can hand out in a period, beyond its VMs' own sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surplus {
    /// The savings of its sharing, less its loans to others, plus its loans from others. Includes
    /// the part that is handed out already.
    pub bytes: Bytes,
    /// The part that borrowers owe and still use. The group does not hand it out until it comes
    /// back, but takes nothing from its own VMs for it either.
    pub awaited: Bytes,
}

/// The least step by which balloons move: 1 MB in the paper (section 6.1).
const LEAST_STEP: Bytes = Bytes::mib(1);

/// An error in the settings; the text names the keys and the values to write instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConfigError {
    /// `cpu_percent` is not a percentage.
    Cpu(f64),
    /// `min` is zero. Half of it would be zero too, and a scanner that stands still finds nothing.
    NoMin,
    /// `unit` is zero: the rate could only fall.
    NoUnit,
    /// `min` is above `max`.
    MinAboveMax {
        /// The given `min`.
        min: scan_rate::Rate,
        /// The given `max`.
        max: scan_rate::Rate,
    },
    /// `step` is smaller than the least step of a balloon.
    Step(Bytes),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(percent) => {
                write!(
                    f,
                    "cpu_percent = {percent} is not a percentage: write 0 to 100, for example 90"
                )
            }
            Self::NoMin => f.write_str("min is zero: write at least 1, for example 5"),
            Self::NoUnit => f.write_str("unit is zero: write at least 1, for example 5"),
            Self::MinAboveMax { min, max } => {
                write!(f, "min = {min} is above max = {max}: raise max or lower min")
            }
            Self::Step(step) => {
                write!(
                    f,
                    "step = {step} is too small: write at least {LEAST_STEP}, for example 10MiB"
                )
            }
        }
    }
}

impl std::error::Error for ConfigError {}

/// Returns the effective step: at least the least step of a balloon.
fn whole(step: Bytes) -> Bytes {
    step.max(LEAST_STEP)
}

fn validate_step(step: Bytes) -> Result<(), ConfigError> {
    if step < LEAST_STEP { Err(ConfigError::Step(step)) } else { Ok(()) }
}
