//! Everything of this crate that the compiler cannot check, and only that.

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches `file` for exceptional conditions (`POLLPRI`).
pub(crate) fn watch_priority(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: the file owns its descriptor, always hands out the same one, and closes it only when it is dropped, which
    // the AsyncFd does after it has taken it off the reactor.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?)
}
