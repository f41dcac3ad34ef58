//! The hosts of a cluster: which of them live, and what each can spare.
//!
//! [`Gossip`] is a state machine without clock or I/O. Its shell passes datagrams and the time in,
//! and sends the datagrams that come out. The foca library performs the protocol, SWIM
//! \[Das02\]: each host probes one other host at a time, and hosts pass on what they learn. The
//! library was chosen over chitchat because it needs neither sockets nor a runtime, so a simulator
//! can run it, and because its datagrams carry only what changed.
//!
//! [`Key`] seals datagrams: only hosts that have the cluster's key can read or make one.

mod config;
mod gossip;
mod member;
mod news;
mod seal;
#[cfg(test)]
mod tests;
mod watch;

pub use config::FORGOTTEN_AFTER;
pub use gossip::{Change, Gossip, Known, Now, Output};
pub use member::Member;
pub use news::{About, News};
pub use seal::{Key, SealError};
