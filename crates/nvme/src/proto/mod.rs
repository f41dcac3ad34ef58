//! Numbers and layouts of the protocol, for hosts and controllers.
//!
//! All fields on the wire are little-endian; the compiler checks the sizes of the layouts. `pdu`
//! holds the units on the wire, `digest` their checksums, and `command` and `completion` their
//! contents. `fabrics` makes a connection a queue of a controller, `auth` authenticates it. By
//! `identify`, `log` and `feature` a controller describes itself, by `introduction` a host of ours
//! names itself.

// The derives of zerocopy generate hidden types without Debug; all types of ours have it.
#![allow(missing_debug_implementations)]

pub mod auth;
pub mod command;
pub mod completion;
pub mod digest;
pub mod fabrics;
pub mod feature;
pub mod identify;
pub mod introduction;
pub mod log;
mod nqn;
pub mod pdu;

pub use command::Command;
pub use completion::{Completion, NvmeStatus};
pub use nqn::{DISCOVERY_NQN, Nqn, NqnError};

/// The port registered for NVMe/TCP (IANA, "nvme").
pub const DEFAULT_PORT: u16 = 4420;
/// The port registered for discovery (IANA, "nvme-disc").
pub const DISCOVERY_PORT: u16 = 8009;
/// Size of a field that holds an NQN and its final zero byte (Base, section 4.5 "NVMe Qualified
/// Names").
pub const NQN_FIELD: usize = 256;
