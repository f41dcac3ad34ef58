//! The unsafe code of this crate, and nothing else.

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches `file` for exceptional conditions (`POLLPRI`).
pub(crate) fn watch_priority(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: the file owns its descriptor, always returns the same one, and closes it only when
    // dropped. The AsyncFd drops the file after it has deregistered the descriptor from the
    // reactor.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?)
}
