//! The system calls that have no safe wrapper elsewhere. The only module of this crate with `unsafe`.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU64};

use linux_raw_sys::general as raw;
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, ProtFlags, UserfaultfdFlags};

pub(crate) use linux_raw_sys::general::{
    uffd_msg, uffdio_api, uffdio_continue, uffdio_copy, uffdio_range, uffdio_register,
    uffdio_zeropage,
};

/// `UFFDIO_CONTINUE_MODE_WP` of `linux/userfaultfd.h`: map the page so that a write is noticed.
pub(crate) const CONTINUE_WP: u64 = 2;

/// A structure that is the argument of one request of userfaultfd, and of no other.
pub(crate) trait Argument {
    const REQUEST: libc::Ioctl;
}

macro_rules! arguments {
    ($($structure:ident: $request:ident,)*) => {
        $(impl Argument for $structure {
            const REQUEST: libc::Ioctl = linux_raw_sys::ioctl::$request as libc::Ioctl;
        })*
    };
}

arguments! {
    uffdio_api: UFFDIO_API,
    uffdio_register: UFFDIO_REGISTER,
    uffdio_range: UFFDIO_WAKE,
    uffdio_copy: UFFDIO_COPY,
    uffdio_zeropage: UFFDIO_ZEROPAGE,
    uffdio_continue: UFFDIO_CONTINUE,
}

/// `struct uffdio_poison` of `linux/userfaultfd.h`.
#[repr(C)]
pub(crate) struct UffdioPoison {
    pub(crate) range: uffdio_range,
    pub(crate) mode: u64,
    pub(crate) updated: i64,
}

impl Argument for UffdioPoison {
    const REQUEST: libc::Ioctl =
        libc::_IOWR::<Self>(raw::UFFDIO, raw::_UFFDIO_POISON) as libc::Ioctl;
}

/// `struct uffdio_writeprotect` of `linux/userfaultfd.h`.
#[repr(C)]
pub(crate) struct UffdioWriteprotect {
    pub(crate) range: uffdio_range,
    pub(crate) mode: u64,
}

impl Argument for UffdioWriteprotect {
    const REQUEST: libc::Ioctl =
        libc::_IOWR::<Self>(raw::UFFDIO, raw::_UFFDIO_WRITEPROTECT) as libc::Ioctl;
}

/// `UFFDIO_WRITEPROTECT_MODE_WP` of `linux/userfaultfd.h`.
pub(crate) const WRITEPROTECT: u64 = 1;

/// `UFFDIO_WRITEPROTECT_MODE_DONTWAKE` without the one above: protect no more, and leave who waits waiting.
pub(crate) const WRITEPROTECT_DONT_WAKE: u64 = 2;

/// A new userfaultfd, for faults of the program and of the kernel on its behalf.
pub(crate) fn userfaultfd() -> io::Result<OwnedFd> {
    // SAFETY: a userfaultfd that nothing is registered with changes nothing.
    Ok(unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?)
}

/// Does what `argument` is for.
///
/// # Safety
/// `uffdio_copy` must name memory of at least that length to read from. `uffdio_copy`, `uffdio_zeropage` and
/// `uffdio_continue` must be for a mapping in whose memory pages may appear, which is what registering it said.
pub(crate) unsafe fn userfault<A: Argument>(
    fd: BorrowedFd<'_>,
    argument: &mut A,
) -> io::Result<()> {
    // SAFETY: the request is the one that takes a pointer to this structure; the rest is the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), A::REQUEST, ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reads one event. None when there is none.
pub(crate) fn event(fd: BorrowedFd<'_>) -> io::Result<Option<uffd_msg>> {
    let mut message = std::mem::MaybeUninit::<uffd_msg>::uninit();
    // SAFETY: there is room for one message, of which the kernel writes all or nothing.
    let length = unsafe {
        libc::read(fd.as_raw_fd(), message.as_mut_ptr().cast::<c_void>(), size_of::<uffd_msg>())
    };
    match length {
        // SAFETY: the kernel has filled all of it.
        length if length == size_of::<uffd_msg>() as isize => {
            Ok(Some(unsafe { message.assume_init() }))
        }
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}

/// The fields of a page fault: address, flags, and the thread. None for another event.
pub(crate) fn page_fault(message: &uffd_msg) -> Option<(u64, u64, u32)> {
    if u32::from(message.event) != raw::UFFD_EVENT_PAGEFAULT {
        return None;
    }
    // SAFETY: the event says that this member of the union is the one that was filled; the kernel fills the thread too,
    // as every descriptor of ours asks for it.
    unsafe {
        let fault = message.arg.pagefault;
        Some((fault.address, fault.flags, fault.feat.ptid))
    }
}

/// Takes the pages out of the page tables, also where the program has locked them: that they are to stay cannot be. What was written to
/// them stays in the file.
///
/// # Safety
/// The range must be of a shared mapping of a file.
pub(crate) unsafe fn unmap_pages(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: the contents of a shared mapping are the file's, which this does not touch.
    let done = unsafe { libc::madvise(start, length, libc::MADV_DONTNEED_LOCKED) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has the kernel refuse `MADV_REMOVE` in the range, which would take pages out of the file without the engine: it does so (`EINVAL`) where
/// memory is locked. Nothing comes to be there by it.
///
/// # Safety
/// The range must be of a mapping whose pages are taken out by [`unmap_pages`] only.
pub(crate) unsafe fn refuse_removal(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: what is touched is there as before, what is not stays away.
    Ok(unsafe { rustix::mm::mlock_with(start, length, MlockFlags::ONFAULT) }?)
}

/// `SO_PEERPIDFD` of `asm-generic/socket.h`.
const PEER_PIDFD: libc::c_int = 77;

/// The process at the other end of a unix socket, when it connected: a pidfd.
pub(crate) fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let (mut pidfd, mut length) = (-1, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the option's value is a number of this size, and both pointers are ours.
    let got = unsafe {
        let value = (&raw mut pidfd).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, PEER_PIDFD, value, &raw mut length)
    };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Keeps the range out of the children of this process, which the engine would know nothing of, and whole huge pages out of it.
///
/// # Safety
/// The range must be of a mapping that no child of the process is to use.
pub(crate) unsafe fn keep_to_this_process(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: neither changes what this process sees.
    unsafe {
        rustix::mm::madvise(start, length, Advice::LinuxDontFork)?;
        rustix::mm::madvise(start, length, Advice::LinuxNoHugepage)?;
    }
    Ok(())
}

/// Maps a part of a file in the place of what is there.
///
/// # Safety
/// What is there must be the caller's to replace, and read the same after it, or be read by nobody meanwhile.
pub(crate) unsafe fn replace(
    address: usize,
    length: usize,
    file: BorrowedFd<'_>,
    offset: u64,
    flags: MapFlags,
) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mmap(start, length, protection, flags | MapFlags::FIXED, file, offset) }?;
    Ok(())
}

/// Brings what is mapped into the page table, to be read.
///
/// # Safety
/// The range must be mapped.
pub(crate) unsafe fn populate(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: reading changes nothing.
    Ok(unsafe { rustix::mm::madvise(start, length, Advice::LinuxPopulateRead) }?)
}

/// What is mapped at an address, as bytes that nobody may write to meanwhile.
///
/// # Safety
/// It must be mapped for as long as it is borrowed, and writes to it be held.
pub(crate) unsafe fn held<'a>(address: usize, length: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(address), length) }
}

/// Blocks all signals for this thread, and says which were blocked.
pub(crate) fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (std::mem::MaybeUninit::uninit(), std::mem::MaybeUninit::uninit());
    // SAFETY: both sets are filled by the calls before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

/// Blocks those signals again that were.
pub(crate) fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: the set is a whole one.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
}

/// A file in this process's memory, shared with whoever else has it.
#[derive(Debug)]
pub struct FileMap {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is only an address and a length; what is there is read and written as atomics.
unsafe impl Send for FileMap {}
// SAFETY: as above.
unsafe impl Sync for FileMap {}

impl FileMap {
    /// Maps the file's first `length` bytes.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn new(file: impl AsFd, length: usize) -> io::Result<Self> {
        Self::with(file, length, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// The same, but nobody may touch it before it is [opened up](Self::open_up): not even the kernel, for a program that locks all its
    /// memory (`MCL_FUTURE`).
    pub(crate) fn closed(file: impl AsFd, length: usize) -> io::Result<Self> {
        Self::with(file, length, ProtFlags::empty())
    }

    fn with(file: impl AsFd, length: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so nothing that is there is replaced.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0)
        }?;
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, length })
    }

    pub(crate) fn open_up(&self) -> io::Result<()> {
        let protection = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: it is ours, and nothing that was there before is less accessible.
        Ok(unsafe { rustix::mm::mprotect(self.start.as_ptr().cast(), self.length, protection) }?)
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// All of it, as bytes that anybody may change at any time.
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: it stays mapped for as long as the borrow, and atomics may be changed by others.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.length) }
    }

    /// The same by words of 64 bits.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: as above, and a mapping is aligned to pages.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.length / size_of::<u64>()) }
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
