//! Numbers and layouts of the protocol, for hosts and controllers alike.
//!
//! Everything on the wire is little-endian; the layouts are checked at compile time. `pdu` is what travels, with `digest`
//! over it; `command` and `completion` are what it carries; `fabrics` makes a connection a queue of a controller, with `auth`;
//! `identify`, `log` and `feature` are what a controller tells of itself, `introduction` what a host of ours tells.

// The derives of zerocopy make hidden types of their own without Debug; ours all have it.
#![allow(missing_debug_implementations)]

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident, $size:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

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
pub use completion::{Completion, Status};
pub use nqn::{DISCOVERY_NQN, Nqn, NqnError};

/// The port registered for NVMe/TCP (IANA, "nvme").
pub const DEFAULT_PORT: u16 = 4420;
/// The port registered for discovery (IANA, "nvme-disc").
pub const DISCOVERY_PORT: u16 = 8009;
/// Bytes of a field that holds an NQN, which ends with a zero byte (Base, section 4.5 "NVMe Qualified Names").
pub const NQN_FIELD: usize = 256;
