//! The unsafe code of this crate, and nothing else.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::Signal;

/// Makes `command` start inside the cgroup of the file `procs` (`cgroup.procs`), so that all its
/// pages are charged there.
pub fn start_in_cgroup(command: &mut Command, procs: File) {
    // SAFETY: between fork and exec the closure only calls write(2) on an open file with constant
    // data. That is async-signal-safe; the closure neither allocates nor takes locks.
    unsafe {
        command.pre_exec(move || (&procs).write_all(b"0"));
    }
}

/// Makes the kernel send `signal` to `command` when the thread that starts it ends (prctl(2),
/// PR_SET_PDEATHSIG). A thread also ends when it returns.
pub fn signal_with_parent(command: &mut Command, signal: Signal) {
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec the closure only calls prctl(2) and getppid(2). Both are
    // async-signal-safe; the closure neither allocates nor takes locks.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
            // The parent may have died before the prctl.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        });
    }
}

/// Turns huge pages off for this process, so that it holds only the pages that it touches.
pub(crate) fn forgo_huge_pages() -> io::Result<()> {
    // SAFETY: PR_SET_THP_DISABLE takes plain integers, and changes only how the kernel serves later
    // page faults of this process.
    let result = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
