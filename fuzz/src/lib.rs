//! Tools that the fuzz targets share: in-process peers, changes to their messages, and numbers
//! worth trying.
#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for panics")]

mod number;
mod peer;
mod secrets;
mod twist;

pub use number::Number;
pub use peer::{Peer, Worker};
pub use secrets::{secret, secrets};
pub use twist::{Delivery, Twist, Twisted};

/// Bytes of a guarded range, which no action of a broken peer may change.
pub const GUARDED_BYTES: usize = 4 * aquifer_page::PAGE_SIZE;

/// The most bytes that a peer sends for one input.
pub const MAX_SENT_BYTES: usize = 4 << 20;
