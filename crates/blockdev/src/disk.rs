//! The interface between a backend and the volume that it serves.

use std::io;

use aquifer_page::{Bytes, WorkerId};

/// A linear space of bytes that a backend serves.
///
/// Implementations MUST be safe to call from several threads at once, and MUST return zeros for
/// ranges that were discarded or never written. They MUST NOT allocate memory or log while they
/// serve a request that succeeds: the kernel may wait for that request to get memory.
///
/// `worker` is below the number of workers that the backend was given. One worker is one thread, so
/// a disk may keep a connection or a buffer for each. Offsets and lengths are in bytes, and
/// multiples of 512 if they come from a block device.
pub trait Disk: Send + Sync + 'static {
    /// Returns the constant size of the disk.
    fn capacity(&self) -> Bytes;

    /// Fills `data` from `offset`.
    fn read(&self, worker: WorkerId, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Stores `data` at `offset`. Once it has returned `Ok`, every later read MUST return these
    /// bytes.
    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Discards `len` bytes at `offset`; they MUST read as zeros from then on.
    fn discard(&self, worker: WorkerId, offset: u64, len: u64) -> io::Result<()>;

    /// Returns once all completed writes are as safe as the disk can make them.
    fn flush(&self, worker: WorkerId) -> io::Result<()>;
}
