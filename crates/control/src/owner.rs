//! The owner of borrowed memory: a host's swap, or a region.

use aquifer_page::RegionName;
use serde::{Deserialize, Serialize};

/// The owner of a lease's pages. Roles are about swap only: a host may lend, or borrow for swap,
/// while its regions hold leases of others.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Option<RegionName>", into = "Option<RegionName>")]
pub enum Owner {
    /// The borrower's swap.
    #[default]
    Swap,
    /// A region of the borrower: the memory of a program or of a VM.
    Region(RegionName),
}

impl Owner {
    /// Returns whether the memory is for swap.
    pub fn is_swap(&self) -> bool {
        *self == Self::Swap
    }

    /// Returns the region, if the memory is for one.
    pub fn region(&self) -> Option<&RegionName> {
        match self {
            Self::Swap => None,
            Self::Region(region) => Some(region),
        }
    }
}

impl From<Option<RegionName>> for Owner {
    fn from(region: Option<RegionName>) -> Self {
        region.map_or(Self::Swap, Self::Region)
    }
}

impl From<Owner> for Option<RegionName> {
    fn from(owner: Owner) -> Self {
        match owner {
            Owner::Swap => None,
            Owner::Region(region) => Some(region),
        }
    }
}
