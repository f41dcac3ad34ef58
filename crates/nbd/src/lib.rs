//! The NBD protocol: fixed newstyle handshake, structured replies, block status.
//!
//! [`server`] serves leases ([`Export`](aquifer_page::export::Export)) to the peers that its
//! [`Exports`](server::Exports) admits. [`client`] is the borrower's end.
//!
//! In this crate, "the specification" is `doc/proto.md` of the NetworkBlockDevice/nbd project.
//! Comments cite its sections by their titles.

pub mod client;
pub mod proto;
pub mod server;
mod uri;

pub use uri::Uri;
