//! A tenant's group of VMs on one host: how fast its pages are scanned for equal ones, and who gets what that saves.
//!
//! After "Group-based memory oversubscription for virtualized clouds" (Groups; Kim et al. 2014). Three machines, each
//! called once a period (1 s in the paper, section 6.1) by a caller that reads, and carries out what comes back:
//! - [`scan_rate`] (section 4.2.1, Algorithm 1): pages per millisecond for the scanner of a group.
//! - [`reprovision`] (sections 4.2.2 and 4.2.3): what sharing saves goes to the group's VMs by balloon, and what is left
//!   to its secondary cache.
//! - [`overhead`] (section 7.1): what one group does not need is lent to another, which pays for the lender's scanner.
//!
//! # In a period
//! First [`overhead::Ledger::step`] for all groups of the host, if any lends: an owner that needs its memory has it taken
//! from borrowers, not from its own VMs. Then, for each group, [`reprovision::Reprovisioner::step`] with the
//! [`Surplus`] of its account, and [`scan_rate::Controller::step`]; for a group whose scanner another one pays, with CPU
//! and swap of the one that pays (section 7.2).

use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

pub mod overhead;
pub mod reprovision;
pub mod scan_rate;

/// What a group has to hand out in a period, beyond what its VMs have anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surplus {
    /// What its sharing saves, less what it lends, and what it borrows. All of it counts, also what is handed out already.
    pub bytes: Bytes,
    /// The part of it that others have to give back and still use: it is not handed out before it comes, and no reason to
    /// take anything from the group's own VMs.
    pub awaited: Bytes,
}

/// The least step in which balloons are moved: 1 MB in the paper (section 6.1).
const LEAST_STEP: Bytes = Bytes::mib(1);

/// Why settings make no sense; the text names the keys and what to write instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConfigError {
    /// `cpu_percent` is no percentage.
    Cpu(f64),
    /// `min` is zero: half of it would be too, and a scanner that stands still finds nothing.
    NoMin,
    /// `unit` is zero: the rate could only fall.
    NoUnit,
    /// `min` is above `max`.
    MinAboveMax {
        /// `min` as given.
        min: scan_rate::Rate,
        /// `max` as given.
        max: scan_rate::Rate,
    },
    /// `step` is less than balloons are moved by.
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

/// The step to go by: if nobody validated it, no less than balloons can.
fn whole(step: Bytes) -> Bytes {
    step.max(LEAST_STEP)
}

fn validate_step(step: Bytes) -> Result<(), ConfigError> {
    if step < LEAST_STEP { Err(ConfigError::Step(step)) } else { Ok(()) }
}
