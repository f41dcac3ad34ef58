//! System calls that the tests need.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const BLKDISCARD: libc::c_ulong = 0x1277;

/// Discards a range of a block device, as swap does.
pub fn discard(device: &File, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64 from its argument; `range` holds them and outlives the call.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
