//! The NBD protocol: fixed newstyle handshake, structured replies, block status.
//!
//! "The specification" in this module's comments is `doc/proto.md` of the NetworkBlockDevice/nbd project.

pub mod client;
pub mod proto;
pub mod server;
