//! The result of one period: the cache's size, and a target for each VM.

use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::TargetDecision;

/// The cache's size and the VMs' targets for one period.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The group's secondary cache. The caller shrinks it first, and then raises VMs' targets.
    pub cache: Cache,
    /// The bytes that VMs hold beyond the surplus, because guests have not given them back yet.
    /// Each period asks for them again.
    pub deficit: Bytes,
    /// The bytes that the surplus lacks for the next step of VMs that swap. The group might borrow
    /// them ([`overhead`](crate::group::overhead)).
    pub short: Bytes,
    /// One decision for each VM, in the order of the readings. The caller carries out lower targets
    /// first.
    pub decisions: Vec<TargetDecision>,
}

/// The size of a group's secondary cache. `Display` writes the reason, with the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// The most that the cache may hold: the rest of the surplus.
    pub size: Bytes,
    /// The surplus.
    pub surplus: Bytes,
    /// The part of the surplus that other groups must still give back.
    pub awaited: Bytes,
    /// The bytes that VMs hold, or have as target.
    pub handed: Bytes,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, surplus, awaited, handed } = self;
        write!(f, "the cache may hold {size}: of a surplus of {surplus}, VMs hold {handed}")?;
        if *awaited > Bytes::ZERO {
            write!(f, " and other groups owe {awaited}")?;
        }
        if handed > surplus {
            write!(f, ", which is {} too much", handed.saturating_sub(*surplus))?;
        }
        Ok(())
    }
}
