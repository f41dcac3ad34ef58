//! NVMe over Fabrics on TCP.
//!
//! "Base" in this module's comments is the NVM Express Base Specification 2.0, "TCP" the NVM Express TCP Transport
//! Specification 1.0, "NVM" the NVM Command Set Specification 1.0; what stands in quotes behind them is the title of the
//! figure or section, as their numbers change with every revision.

pub mod auth;
pub mod initiator;
pub mod proto;
pub mod target;
