//! Refusal of calls that pin the program's memory.
//!
//! A device writes to pinned memory without a mark in the page table. It continues after the page
//! has left the region's cache. So the engine keeps every page while its program has memory pinned.
//! Most programs work without pinning, so this library reports pinning as unsupported.

use std::sync::Once;

use crate::regions::tell;
use crate::sys;

/// Makes calls that pin memory for long fail with `EOPNOTSUPP`, in this program and its children.
/// Only the first call acts.
pub(crate) fn refuse() {
    static REFUSED: Once = Once::new();
    REFUSED.call_once(|| {
        if let Err(error) = sys::refuse_pinning(sys::ALL_THREADS) {
            tell(&format!(
                "cannot refuse memory pinning (seccomp: {error}); if the program pins memory, \
                 no page can leave the cache, and writes of VFIO devices to the region can be lost"
            ));
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::io;
    use std::thread;

    use super::*;

    fn error_of(result: libc::c_long) -> Option<i32> {
        if result < 0 { io::Error::last_os_error().raw_os_error() } else { None }
    }

    /// Returns the kernel's error for this operation on an invalid descriptor.
    fn register(operation: u32) -> Option<i32> {
        // SAFETY: there is no such descriptor, so nothing is registered.
        error_of(unsafe { libc::syscall(libc::SYS_io_uring_register, -1, operation, 0, 0) })
    }

    fn control(request: u64) -> Option<i32> {
        // SAFETY: as above.
        error_of(unsafe { libc::syscall(libc::SYS_ioctl, -1, request, 0) })
    }

    #[test]
    fn only_calls_that_pin_memory_are_refused() {
        // A thread of its own, as the refusal stays in that thread.
        let refused = thread::spawn(|| {
            sys::refuse_pinning(0).unwrap();
            let registers = [0, 15, 16, 30, 1 << 31].map(register);
            let maps = [0x3b71, 0x3b85].map(control);
            (registers, maps, [register(2), control(0x5401)])
        });
        let (registers, maps, others) = refused.join().unwrap();
        let refused = Some(libc::EOPNOTSUPP);
        assert_eq!((registers, maps), ([refused; 5], [refused; 2]));
        assert!(!others.contains(&refused), "{others:?}");
        assert_ne!(register(0), refused, "only that thread");
    }
}
