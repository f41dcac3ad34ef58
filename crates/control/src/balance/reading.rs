use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::Limits;

/// What a period finds of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// What VMs may still grow by, without what is promised to one of them ([`Limits::reserve`]).
    pub sections_free: Bytes,
    /// What a VM grows and shrinks by multiples of: virtio-mem's block, or a multiple of it. With zero, nothing is moved.
    pub section: Bytes,
    /// The host itself is short of memory. Then VMs grow only to their min and for wishes (an application waits, and would
    /// fail): what else a VM is given now, the host would swap out in its place. And surpluses that last go back to the
    /// host whatever [`Config::keep_surplus`](super::Config::keep_surplus) says: a guest's page cache is cheaper to lose.
    pub short: bool,
}

/// What a period finds of one VM. All figures but `size` are the guest's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Which VM.
    pub vm: RegionName,
    /// What it has now, as the host counts. Need not be a multiple of a section: it moves by whole ones from there.
    pub size: Bytes,
    /// `MemTotal`: less than `size` by what the guest's kernel keeps for itself.
    pub total: Bytes,
    /// `MemAvailable`.
    pub available: Bytes,
    /// Read from swap since the guest booted (`pswpin`), in bytes.
    pub swap_in: u64,
    /// Written to swap since the guest booted (`pswpout`), in bytes.
    pub swap_out: u64,
    /// What is in swap now: wants to come back.
    pub swap_used: Bytes,
    /// PSI `some avg10` of the guest, in percent, if its kernel has it.
    pub pressure: Option<f64>,
    /// What its applications have asked for and not got yet (section III-C, pro-active).
    pub wish: Bytes,
    /// What the operator set.
    pub limits: Limits,
    /// The guest's figures are fresh. If not, they are not looked at, and the VM keeps what it has.
    pub answers: bool,
    /// A resize is running: the VM counts with what it has, and isn't touched in this period.
    pub busy: bool,
}

impl Reading {
    /// Whether there are figures, and such as a guest could have.
    pub(super) fn tells(&self) -> bool {
        self.answers && self.total > Bytes::ZERO && self.available <= self.total
    }
}
