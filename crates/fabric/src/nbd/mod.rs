//! The NBD protocol: fixed newstyle handshake, structured replies, block status.
//!
//! In this module, "the specification" is `doc/proto.md` of the NetworkBlockDevice/nbd project.

pub mod client;
pub mod proto;
pub mod server;
