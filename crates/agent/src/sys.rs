//! The unsafe code of this crate, and nothing else.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a file for these events.
pub(crate) fn watch(file: impl Into<OwnedFd>, events: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always returns the same descriptor, and closes it only when dropped. The
    // AsyncFd drops it after it has deregistered the descriptor from the reactor.
    Ok(unsafe { AsyncFd::register_with_interest(file.into(), events) }?)
}

/// Returns the supplementary groups of the process at the other end of a unix socket, as they were
/// when it connected (unix(7), SO_PEERGROUPS, Linux 4.13).
pub(crate) fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    // The kernel allows no more (NGROUPS_MAX).
    let mut groups = vec![0_u32; 65_536];
    let mut size = (groups.len() * size_of::<u32>()) as libc::socklen_t;
    // SAFETY: the descriptor is open, and the kernel writes at most `size` bytes to the buffer,
    // which has as many.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(size as usize / size_of::<u32>());
    Ok(groups)
}

/// Returns the number of a group of this host.
pub(crate) fn group_number(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 1 << 20];
    let (mut group, mut found) = (MaybeUninit::uninit(), std::ptr::null_mut());
    // SAFETY: all pointers are valid for the call, and the buffer has the length given.
    let failed = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            group.as_mut_ptr(),
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    if failed != 0 || found.is_null() {
        return None;
    }
    // SAFETY: the call found the group, so it has written all of it.
    Some(unsafe { group.assume_init() }.gr_gid)
}
