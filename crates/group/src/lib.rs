//! A tenant's group: VMs whose pages may be shared with each other and with no one else's (Groups, section 3).
//!
//! What its members agree on is an [`Agreement`], a file that all hosts of the group have. Equal pages of its regions on a host are found by a
//! [`scan::Scanner`]; what that saves is handed out by a [`balance::Balancing`].

mod agreement;
pub mod balance;
mod member;
pub mod scan;

pub use agreement::{Agreement, Agreements, GroupError, Limits, Sealed};
