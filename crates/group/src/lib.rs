//! A tenant's group: VMs whose pages may be shared with each other and with no one else's (Groups, section 3).
//!
//! What its members agree on is an [`Agreement`], a file that all hosts of the group have.

mod agreement;

pub use agreement::{Agreement, Agreements, GroupError, Sealed};
