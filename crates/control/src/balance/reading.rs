//! The input of one period: the host's free memory, and each guest's figures.

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::Limits;

/// The state of the host in one period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The memory that VMs may still grow by, without the reserves promised to single VMs
    /// ([`Limits::reserve`]).
    pub sections_free: Bytes,
    /// The memory that the host has lent, and can recall for its VMs. They may grow by it, too,
    /// once it is back.
    #[serde(default)]
    pub recallable: Bytes,
    /// The unit of resizes: virtio-mem's block size, or a multiple of it. With zero, nothing moves.
    pub section: Bytes,
    /// Whether the host itself is short of memory. VMs then grow only to their min and for wishes,
    /// because an application that waits would fail. For any other growth, the host would swap
    /// other pages out. Lasting surpluses return to the host whatever
    /// [`Config::keep_surplus`](super::Config::keep_surplus) says: a guest's page cache is cheaper
    /// to lose.
    pub short: bool,
}

/// The state of one VM in one period. All figures but `size` come from the guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// The VM.
    pub vm: RegionName,
    /// The VM's size as the host counts it, not always a multiple of a section. Resizes change the
    /// size by whole sections.
    pub size: Bytes,
    /// `MemTotal`, which is below `size` by the memory that the guest's kernel reserves.
    pub total: Bytes,
    /// `MemAvailable`.
    pub available: Bytes,
    /// Bytes read from swap since the guest booted (`pswpin`).
    pub swap_in: u64,
    /// Bytes written to swap since the guest booted (`pswpout`).
    pub swap_out: u64,
    /// The memory in swap, which the guest will want back.
    pub swap_used: Bytes,
    /// PSI `some avg10` of the guest, in percent, if its kernel has PSI.
    pub pressure: Option<f64>,
    /// The memory that the guest's applications have asked for and not got yet (\[Bielski18\]
    /// III-C, pro-active).
    pub wish: Bytes,
    /// The operator's limits.
    pub limits: Limits,
    /// Whether the guest's figures are fresh. If not, the balancer ignores them, and the VM keeps
    /// its size.
    pub answers: bool,
    /// Whether a resize is running. The VM then counts with its present size, and does not move in
    /// this period.
    pub busy: bool,
}

impl Reading {
    /// Whether the guest's figures are fresh and plausible.
    pub(super) fn tells(&self) -> bool {
        self.answers && self.total > Bytes::ZERO && self.available <= self.total
    }
}
