//! NVMe over Fabrics on TCP.
//!
//! "Base" in this module's comments is the NVM Express Base Specification 2.0, "TCP" the NVM Express TCP Transport
//! Specification 1.0, "NVM" the NVM Command Set Specification 1.0, all of 2021. Other revisions number figures and
//! sections differently; the titles, in quotes, stay.

pub mod auth;
pub mod initiator;
pub mod proto;
pub mod target;
