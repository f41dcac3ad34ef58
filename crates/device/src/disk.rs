use std::io;

use aquifer_page::Bytes;

/// What a backend serves: a linear space of bytes.
///
/// Implementations MUST be safe to call from several threads at once, MUST give zeros for what was never written
/// or was discarded, and MUST NOT allocate memory or log on the path of a request that succeeds: the kernel may
/// be waiting for the request in order to have memory at all.
///
/// `worker` is below the number of workers that the backend was given; one worker is one thread, so a disk may
/// keep a connection or a buffer for each. Offsets and lengths are bytes, and multiples of 512 when they come
/// from a block device.
pub trait Disk: Send + Sync + 'static {
    /// Size of the disk; it does not change.
    fn capacity(&self) -> Bytes;

    /// Fills `data` from `offset`.
    fn read(&self, worker: usize, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Stores `data` at `offset`. Once this has returned `Ok`, every later read MUST give these bytes.
    fn write(&self, worker: usize, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Forgets `len` bytes at `offset`; they MUST read as zeros from then on.
    fn discard(&self, worker: usize, offset: u64, len: u64) -> io::Result<()>;

    /// Returns when everything written so far is as safe as the disk can make it.
    fn flush(&self, worker: usize) -> io::Result<()>;
}
