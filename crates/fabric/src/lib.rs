//! Pages over the network: NVMe/TCP and NBD, targets and initiators, mutual TLS.
//!
//! [`nbd::server`] serves leases ([`Export`](aquifer_page::export::Export)) to the peers that its
//! [`Exports`](nbd::server::Exports) admits. [`nbd::client`] is the borrower's end. Both use a
//! [`Channel`](channel::Channel): a plain socket, or one under mutual TLS ([`tls`]).
//! [`nvme::target`] serves leases to the NVMe hosts that its
//! [`Subsystems`](nvme::target::Subsystems) admits. [`nvme::initiator`] is the borrower's end, and
//! works with any conforming target.

pub mod accepting;
pub mod address;
pub mod channel;
mod initiating;
pub mod initiator;
mod lookout;
pub mod names;
pub mod nbd;
pub mod nvme;
pub mod poll_token;
mod serving;
pub mod sleep;
pub mod tls;

pub use address::{Address, AddressError, NvmeUri, Uri};
pub use serving::ConnectionLimits;
