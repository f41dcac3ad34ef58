//! The unsafe code of this crate, and nothing else.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a file for these events.
pub(crate) fn watch(file: impl Into<OwnedFd>, events: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always returns the same descriptor, and closes it only when dropped. The
    // AsyncFd drops it after it has deregistered the descriptor from the reactor.
    Ok(unsafe { AsyncFd::register_with_interest(file.into(), events) }?)
}
