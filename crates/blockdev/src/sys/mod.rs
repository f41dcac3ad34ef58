//! System calls without a safe wrapper elsewhere. Only this module of the crate uses `unsafe`.

pub(crate) mod ublk;

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls `ioctl` with an argument that is a plain number, or that the kernel ignores.
///
/// Callers must not pass requests that take a pointer: the number is not an address.
pub(crate) fn ioctl_number(
    fd: impl AsFd,
    request: libc::c_ulong,
    argument: libc::c_ulong,
) -> io::Result<i32> {
    // SAFETY: the descriptor is open during the call. Callers in this crate pass only requests with
    // an argument by value.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, argument) })
}

/// The loop driver's interface (`linux/loop.h`).
pub(crate) mod loop_control {
    use super::*;

    /// `struct loop_info64`.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(crate) struct Info {
        pub(crate) device: u64,
        pub(crate) inode: u64,
        pub(crate) rdevice: u64,
        pub(crate) offset: u64,
        pub(crate) size_limit: u64,
        pub(crate) number: u32,
        pub(crate) encrypt_type: u32,
        pub(crate) encrypt_key_size: u32,
        pub(crate) flags: u32,
        pub(crate) file_name: [u8; 64],
        /// `lo_crypt_name` and `lo_encrypt_key`: no device of ours encrypts.
        pub(crate) encryption: [u8; 96],
        pub(crate) init: [u64; 2],
    }

    /// `struct loop_config`.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(crate) struct Config {
        pub(crate) fd: u32,
        pub(crate) block_size: u32,
        pub(crate) info: Info,
        pub(crate) reserved: [u64; 8],
    }

    const _: () = assert!(size_of::<Info>() == 232 && size_of::<Config>() == 304);

    const CONFIGURE: libc::c_ulong = 0x4C0A;
    const GET_STATUS64: libc::c_ulong = 0x4C05;
    const CTL_GET_FREE: libc::c_ulong = 0x4C82;

    pub(crate) const FLAG_AUTOCLEAR: u32 = 4;
    pub(crate) const FLAG_DIRECT_IO: u32 = 16;

    impl Info {
        /// All fields zero.
        pub(crate) const ZERO: Self = Self {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: 0,
            file_name: [0; 64],
            encryption: [0; 96],
            init: [0; 2],
        };
    }

    /// Returns the number of a loop device that is unused at this moment.
    pub(crate) fn get_free(control: impl AsFd) -> io::Result<u32> {
        ioctl_number(control, CTL_GET_FREE, 0).map(|number| number as u32)
    }

    /// Binds `backing` to the loop device behind `device`.
    pub(crate) fn configure(
        device: impl AsFd,
        backing: BorrowedFd<'_>,
        block_size: u32,
        info: Info,
    ) -> io::Result<()> {
        let config = Config { fd: backing.as_raw_fd() as u32, block_size, info, reserved: [0; 8] };
        // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`; `config` is one and outlives the
        // call.
        check(unsafe {
            libc::ioctl(device.as_fd().as_raw_fd(), CONFIGURE as _, &raw const config)
        })?;
        Ok(())
    }

    /// Returns the binding of the loop device behind `device`.
    pub(crate) fn status(device: impl AsFd) -> io::Result<Info> {
        let mut info = Info::ZERO;
        // SAFETY: LOOP_GET_STATUS64 writes one `struct loop_info64`, for which every bit pattern is
        // valid.
        check(unsafe {
            libc::ioctl(device.as_fd().as_raw_fd(), GET_STATUS64 as _, &raw mut info)
        })?;
        Ok(info)
    }
}

/// Calls `swapon(2)`.
pub(crate) fn swapon(device: &CStr, flags: i32) -> io::Result<()> {
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::swapon(device.as_ptr(), flags) })?;
    Ok(())
}

/// Calls `swapoff(2)`.
pub(crate) fn swapoff(device: &CStr) -> io::Result<()> {
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::swapoff(device.as_ptr()) })?;
    Ok(())
}

/// Discards `length` bytes from the start of the block device `device` (`BLKDISCARD`).
pub(crate) fn discard(device: impl AsFd, length: u64) -> io::Result<()> {
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let range = [0, length];
    // SAFETY: BLKDISCARD reads two 64-bit numbers; `range` holds them and outlives the call.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKDISCARD as _, &raw const range) })?;
    Ok(())
}

/// Forks; returns true in the parent and false in the child. Fails if the process has more than one
/// thread. The child would lack the others, and locks that they hold would stay held.
pub(crate) fn fork() -> io::Result<bool> {
    if std::fs::read_dir("/proc/self/task")?.count() > 1 {
        return Err(io::Error::other("this process has started threads already"));
    }
    // SAFETY: there is one thread, so the child has a copy of everything in a consistent state.
    check(unsafe { libc::fork() }).map(|child| child > 0)
}

/// Gives the calling thread, and the threads that it starts, the lowest real-time priority.
pub(crate) fn real_time_priority() -> io::Result<()> {
    set_scheduler(libc::SCHED_RR, 1)
}

/// Undoes [`real_time_priority`].
pub(crate) fn ordinary_priority() -> io::Result<()> {
    set_scheduler(libc::SCHED_OTHER, 0)
}

fn set_scheduler(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: sched_setscheduler reads one `struct sched_param`, which outlives the call; 0 is the
    // calling thread.
    check(unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) })?;
    Ok(())
}

/// Makes the allocator keep all its memory in one heap for all threads. Once grown and touched,
/// that heap serves allocations without a system call. Allocations above 32 MiB still get mappings
/// of their own.
pub(crate) fn keep_heap() -> io::Result<()> {
    #[cfg(target_env = "gnu")]
    {
        const LARGEST_THRESHOLD: libc::c_int = 32 << 20;
        let settings = [
            (libc::M_ARENA_MAX, 1),
            (libc::M_TRIM_THRESHOLD, libc::c_int::MAX),
            (libc::M_MMAP_THRESHOLD, LARGEST_THRESHOLD),
        ];
        for (parameter, value) in settings {
            // SAFETY: mallopt takes two numbers and refuses unknown ones.
            if unsafe { libc::mallopt(parameter, value) } != 1 {
                return Err(io::Error::other("the allocator refused a setting"));
            }
        }
        Ok(())
    }
    #[cfg(not(target_env = "gnu"))]
    Err(io::Error::new(io::ErrorKind::Unsupported, "this is known for glibc's allocator only"))
}

/// Anonymous memory that is resident and locked; freed when dropped.
#[derive(Debug)]
pub(crate) struct LockedMemory {
    start: ptr::NonNull<std::ffi::c_void>,
    length: usize,
}

// SAFETY: only the owner of this value has the address, and uses it only to free the memory.
unsafe impl Send for LockedMemory {}

impl LockedMemory {
    /// Allocates `length` bytes of resident memory, and locks them if this process may lock so
    /// much.
    pub(crate) fn new(length: usize) -> io::Result<Self> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::POPULATE);
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, protection, flags) }?;
        let start = ptr::NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Self { start, length };
        // SAFETY: this value owns the range. Without the lock, the memory serves until the kernel
        // swaps it out.
        let _ = unsafe { rustix::mm::mlock(memory.start.as_ptr(), length) };
        Ok(memory)
    }
}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and no other code reads or writes it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.length) };
    }
}
