//! Several hosts on one machine, for tests and demos: their files, networks, agents and daemons.
//!
//! A host is an agent with an address and directories of its own. Its processes are real. It may
//! have a network namespace ([`Network`]); without one, its address is on loopback.

pub mod daemon;
mod error;
mod export;
mod host;
mod network;
mod reports;
mod switched;
mod sys;
mod wait;

pub use daemon::Binary;
pub use error::{Error, Result};
pub use export::Export;
pub use host::{Host, Place, block_on, stored};
pub use network::{Namespace, Network};
pub use reports::Daemon;
pub use switched::Switched;
pub use wait::{wait_for, wait_until};
