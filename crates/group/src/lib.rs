//! A tenant's group: VMs that may share pages among themselves and with no others (\[Kim14\],
//! section 3).
//!
//! The members' [`Agreement`] is a file that all hosts of the group have. A [`scan::Scanner`] finds
//! equal pages of the group's regions on a host. A [`balance::Balancing`] hands out the saved
//! memory. A [`cache`] uses the rest for pages of the guests' disks.

mod agreement;
pub mod balance;
pub mod cache;
mod join;
mod member;
pub mod scan;
mod sys;

pub use agreement::{Agreement, Agreements, GroupEncryption, GroupError, Limits, NamedAgreement};
