//! Connections between hosts, whatever the protocol: sockets, mutual TLS, listeners, addresses.
//!
//! A protocol loop uses a [`Channel`](channel::Channel): a plain socket, or one under mutual TLS
//! ([`tls`]). A server of a protocol is a [`Service`](serving::Service) of a
//! [`Listener`](serving::Listener). A borrower's end of a protocol is an
//! [`Initiator`](initiator::Initiator), on top of [`initiating`].

pub mod accepting;
pub mod address;
pub mod channel;
pub mod initiating;
pub mod initiator;
mod layout;
mod lookout;
pub mod names;
pub mod poll_token;
pub mod serving;
pub mod sleep;
pub mod tls;

pub use address::{Address, AddressError};
pub use serving::ConnectionLimits;
