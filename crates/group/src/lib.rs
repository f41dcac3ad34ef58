//! A tenant's group: VMs whose pages may be shared with each other and with no one else's (Groups, section 3).
//!
//! What its members agree on is an [`Agreement`], a file that all hosts of the group have. Equal pages of its regions on a host are found by a
//! [`scan::Scanner`]; what that saves is handed out by a [`balance::Balancing`], and what nobody needs of it keeps what guests have read from their disks, in
//! a [`cache`].

mod agreement;
pub mod balance;
pub mod cache;
mod join;
mod member;
pub mod scan;
mod sys;

pub use agreement::{Agreement, Agreements, GroupError, Limits, NamedAgreement, Sealed};
