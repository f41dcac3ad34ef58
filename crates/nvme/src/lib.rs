//! NVMe over Fabrics on TCP.
//!
//! [`target`] serves leases ([`Export`](aquifer_page::export::Export)) to the hosts that its
//! [`Subsystems`](target::Subsystems) admits. [`initiator`] is the borrower's end, and works with
//! any conforming target.
//!
//! In this crate's comments "Base" is the NVM Express Base Specification 2.0. "TCP" is the NVM
//! Express TCP Transport Specification 1.0. "NVM" is the NVM Command Set Specification 1.0. All
//! three are of 2021. Other revisions number figures and sections differently, but keep the titles
//! quoted here.

pub mod auth;
pub mod initiator;
pub mod proto;
pub mod target;
mod uri;

pub use uri::NvmeUri;
