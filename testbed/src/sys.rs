//! Everything of this crate that the compiler cannot check, and only that.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::Signal;

/// Makes `command` inherit `descriptors`, under the numbers that they have here, and die when the thread that starts it
/// does: with the process, however that ends, or by returning.
pub(crate) fn bind(command: &mut Command, descriptors: Vec<OwnedFd>) {
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec the closure only calls prctl(2), getppid(2) and fcntl(2), which are async-signal-safe;
    // it neither allocates nor takes locks. The descriptors are open: the closure owns them.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the request was made.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            descriptors.iter().try_for_each(|descriptor| keep_open(descriptor.as_raw_fd()))
        });
    }
}

fn keep_open(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: F_SETFD takes a plain integer and changes only whether execve(2) closes the descriptor.
    let result = unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The time stamp counter of the processor.
pub(crate) fn time_stamp() -> u64 {
    // SAFETY: RDTSC is there on every x86-64 processor, reads a counter and changes nothing.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Keeps all that this process touches in memory, so that it goes on when the swap device does not.
///
/// # Errors
/// What mlockall(2) says.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: mlockall takes plain flags and changes only whether pages of this process may be swapped out.
    let result =
        unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
