//! The classes of a host's memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A class of a host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// The use of the kernel and of programs other than VMs, regions and caches. At least the part
    /// of the configured reserve M_r that VMs, regions and caches leave.
    Reserved,
    /// The memory that VMs never shrink below, and their reserves for when they run out of memory.
    VmFloor,
    /// The memory of VMs above their floors, which they give up on request.
    VmElastic,
    /// The local caches of regions, as large as they may become, and the frames that regions share.
    CacheFloor,
    /// The memory that groups save by sharing, and the disk caches in it.
    GroupSurplus,
    /// The capacity of leases and of exports made by hand. Leases can be recalled.
    Lent,
    /// The capacity of leases with second copies of other hosts' pages, in memory that nobody
    /// needs. These leases are the first to be recalled.
    Mirror,
    /// All other memory.
    Free,
}

impl Class {
    /// All classes, in the order in which people read them.
    pub const ALL: [Self; 8] = [
        Self::Reserved,
        Self::VmFloor,
        Self::VmElastic,
        Self::CacheFloor,
        Self::GroupSurplus,
        Self::Lent,
        Self::Mirror,
        Self::Free,
    ];
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reserved => "reserved",
            Self::VmFloor => "vm floor",
            Self::VmElastic => "vm elastic",
            Self::CacheFloor => "cache floor",
            Self::GroupSurplus => "group surplus",
            Self::Lent => "lent",
            Self::Mirror => "mirror",
            Self::Free => "free",
        })
    }
}
