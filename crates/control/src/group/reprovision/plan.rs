use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::Verdict;

/// What is to be done in a period, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The group's secondary cache. To be made smaller before a VM is told to have more.
    pub cache: Cache,
    /// What VMs hold beyond the surplus: guests have not given it back yet. It is asked for again each period.
    pub deficit: Bytes,
    /// What the surplus lacks for the next step of VMs that swap: what a group might borrow
    /// ([`overhead`](crate::group::overhead)).
    pub short: Bytes,
    /// One for each VM, in the order of the readings. What they take back is to be carried out first.
    pub verdicts: Vec<Verdict>,
}

/// How large a group's secondary cache is to be. `Display` says why, with the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// What it is to hold at most: what is left of the surplus.
    pub size: Bytes,
    /// The surplus.
    pub surplus: Bytes,
    /// What others have still to give back of it.
    pub awaited: Bytes,
    /// What VMs hold of it, or are told to.
    pub handed: Bytes,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, surplus, awaited, handed } = self;
        write!(f, "the cache may hold {size}: of a surplus of {surplus}, VMs hold {handed}")?;
        if *awaited > Bytes::ZERO {
            write!(f, " and other groups {awaited} that they give back")?;
        }
        if handed > surplus {
            write!(f, ", which is {} more than there is", handed.saturating_sub(*surplus))?;
        }
        Ok(())
    }
}
