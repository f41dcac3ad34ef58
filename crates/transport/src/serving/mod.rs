//! Common parts of the servers of every protocol: accepting connections, a thread for each, and its
//! buffers.

mod acceptor;
mod book;
mod connections;
mod gather;
mod inbox;
pub mod limits;
mod listener;
mod outbox;

pub use acceptor::Origin;
pub use book::ConnectionLimits;
pub use connections::{Connected, Connections};
pub use gather::{Gather, ZEROES, zeroes};
pub use inbox::{INBOX, Inbox};
pub use listener::{ListenError, Listener, Place, Service, serve_alone};
pub use outbox::{OUTBOX, Outbox};
