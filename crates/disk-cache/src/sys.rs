//! System calls without a safe wrapper elsewhere. Only this module of the crate uses `unsafe`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// Takes a shared lock of a byte for this open file description. The lock ends when the
/// description's last descriptor is closed (fcntl(2), open file description locks).
pub(crate) fn lock_byte(file: &File, byte: i64) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_RDLCK, (byte, 1)).map(drop)
}

/// Returns whether another open file description holds a lock of this byte.
pub(crate) fn is_locked_byte(file: &File, byte: i64) -> io::Result<bool> {
    Ok(fcntl(file, libc::F_OFD_GETLK, libc::F_WRLCK, (byte, 1))? != libc::F_UNLCK)
}

/// Releases all locks of this open file description.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    // A length of 0 means up to the end of the file.
    fcntl(file, libc::F_OFD_SETLK, libc::F_UNLCK, (0, 0)).map(drop)
}

fn fcntl(
    file: &File,
    command: libc::c_int,
    kind: libc::c_int,
    (start, length): (i64, i64),
) -> io::Result<libc::c_int> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        // The kernel requires 0 for locks of open file descriptions (fcntl(2)).
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and `lock` is a complete `flock` that outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock.l_type.into()),
    }
}
