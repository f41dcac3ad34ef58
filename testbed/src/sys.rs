//! The unsafe code of this crate, and nothing else.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::Signal;

/// Makes `command` inherit `descriptors` under their current numbers. The kernel kills the child
/// when the thread that started it ends, with the process or by returning (PR_SET_PDEATHSIG in
/// prctl(2)).
pub(crate) fn bind(command: &mut Command, descriptors: Vec<OwnedFd>) {
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec the closure only calls prctl(2), getppid(2) and fcntl(2), which
    // are async-signal-safe. The closure neither allocates nor takes locks. The descriptors are
    // open, because the closure owns them.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the request took effect.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            descriptors.iter().try_for_each(|descriptor| keep_open(descriptor.as_raw_fd()))
        });
    }
}

fn keep_open(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: F_SETFD takes a plain integer and changes only whether execve(2) closes the
    // descriptor.
    let result = unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the processor's time stamp counter.
pub(crate) fn time_stamp() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, which reads a counter and changes nothing.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Locks the pages that this process touches in memory, so that it survives the loss of the swap
/// device.
///
/// # Errors
/// If mlockall(2) fails.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: mlockall takes plain flags and changes only whether the kernel may swap out this
    // process's pages.
    let result =
        unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
