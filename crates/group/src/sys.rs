//! The system calls that have no safe wrapper elsewhere. The only module of this crate with `unsafe`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// Locks a byte of a file for this opening of it, as others may too. The lock goes with the last handle to the opening.
pub(crate) fn lock_byte(file: &File, byte: i64) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_RDLCK, (byte, 1)).map(drop)
}

/// Whether another opening of the file has this byte locked.
pub(crate) fn is_locked_byte(file: &File, byte: i64) -> io::Result<bool> {
    Ok(fcntl(file, libc::F_OFD_GETLK, libc::F_WRLCK, (byte, 1))? != libc::F_UNLCK)
}

/// Gives up all locks of this opening.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    // A length of 0 is all there is.
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
        // As the kernel demands of locks of an opening.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and `lock` a whole `flock` that outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock.l_type.into()),
    }
}
