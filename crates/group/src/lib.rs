//! A tenant's group: VMs whose pages may be shared with each other and with no one else's (Groups, section 3).
//!
//! What its members agree on is an [`Agreement`], a file that all hosts of the group have. Equal pages of its regions on a host are found by a
//! [`scan::Scanner`].

mod agreement;
pub mod scan;

pub use agreement::{Agreement, Agreements, GroupError, Sealed};
