//! The NBD protocol: fixed newstyle handshake, structured replies, block status.
//!
//! In this module, "the specification" is `doc/proto.md` of the NetworkBlockDevice/nbd project.
//! Comments cite its sections by their titles.

pub mod client;
pub mod proto;
pub mod server;
