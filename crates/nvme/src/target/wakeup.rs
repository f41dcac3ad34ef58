//! The wakeup of an admin queue's thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

/// An eventfd that wakes a thread out of poll(2).
#[derive(Debug)]
pub(super) struct Wakeup(OwnedFd);

impl Wakeup {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn wake(&self) {
        // The write fails only if the counter is at its maximum, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Resets the wakeup, so that poll(2) waits again.
    pub(super) fn reset(&self) {
        // The read fails if no wakeup is pending.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
