//! Common parts of the servers of every protocol: accepting connections, a thread for each, and its
//! buffers.

mod acceptor;
mod book;
mod gather;
mod inbox;
mod listener;
mod outbox;

pub(crate) use acceptor::Origin;
pub use book::ConnectionLimits;
pub(crate) use gather::{Gather, ZEROES, zeroes};
pub(crate) use inbox::{INBOX, Inbox};
pub(crate) use listener::{Listener, Place, Service, serve_alone};
pub(crate) use outbox::{OUTBOX, Outbox};
