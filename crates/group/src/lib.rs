//! A tenant's group: VMs that may share pages among themselves and with no others (\[Kim14\],
//! section 3).
//!
//! The members' [`Agreement`] is a file that the hosts of the group have, and their agents pass it
//! on. The group's scanner ([`aquifer_dedup`]) saves memory on a host, and a [`scanning::Scanning`]
//! keeps it running. A [`balance::Balancing`] hands the memory out. The disk cache
//! ([`aquifer_disk_cache`]) uses the rest for pages of the guests' disks, and a
//! [`caching::Caching`] keeps that running.

mod agreement;
pub mod balance;
pub mod caching;
mod helper;
mod join;
mod records;
pub mod scanning;

pub use agreement::{
    Agreement, Agreements, GroupEncryption, GroupError, LARGEST_AGREEMENT, Limits, NamedAgreement,
    digest,
};
pub use records::{Held, Offered, Survey};

/// A change of a process that an agent keeps for a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// The group.
    pub group: aquifer_page::Group,
    /// One sentence, for the log and for `aquifer why`.
    pub what: String,
    /// Whether it is a failure.
    pub failed: bool,
}
