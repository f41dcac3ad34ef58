//! The system calls that have no safe wrapper elsewhere.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU64};

use aquifer_page::{HUGE_PAGE_SIZE, PAGE_SIZE};
use linux_raw_sys::general as raw;
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, ProtFlags, UserfaultfdFlags};

pub(crate) use linux_raw_sys::general::{
    uffd_msg, uffdio_api, uffdio_continue, uffdio_copy, uffdio_range, uffdio_register,
    uffdio_zeropage,
};

/// `UFFDIO_CONTINUE_MODE_WP` of `linux/userfaultfd.h`: map the page write-protected, so that a
/// write is marked.
pub(crate) const CONTINUE_WP: u64 = 2;

/// A structure that is the argument of exactly one userfaultfd request.
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

/// `UFFDIO_WRITEPROTECT_MODE_DONTWAKE` without the flag above: removes protection, and leaves
/// waiting threads asleep.
pub(crate) const WRITEPROTECT_DONT_WAKE: u64 = 2;

/// Makes a userfaultfd for faults of user code and of system calls.
pub(crate) fn userfaultfd() -> io::Result<OwnedFd> {
    // SAFETY: a userfaultfd with nothing registered changes nothing.
    Ok(unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?)
}

/// Performs the request of `argument`.
///
/// # Safety
/// `uffdio_copy` must name readable memory of at least its length. `uffdio_copy`, `uffdio_zeropage`
/// and `uffdio_continue` must be for a registered mapping, where pages may appear.
pub(crate) unsafe fn userfault<A: Argument>(
    fd: BorrowedFd<'_>,
    argument: &mut A,
) -> io::Result<()> {
    // SAFETY: the request takes a pointer to this structure; the rest is the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), A::REQUEST, ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The most events that one call reads.
const EVENTS: usize = 16;

/// Reads the events that wait, at most [`EVENTS`] of them.
pub(crate) fn events(fd: BorrowedFd<'_>) -> io::Result<Vec<uffd_msg>> {
    let mut messages = Vec::<uffd_msg>::with_capacity(EVENTS);
    let room = EVENTS * size_of::<uffd_msg>();
    // SAFETY: there is room for so many messages, each of which the kernel writes wholly.
    let length =
        unsafe { libc::read(fd.as_raw_fd(), messages.as_mut_ptr().cast::<c_void>(), room) };
    match usize::try_from(length) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(length) => {
            // SAFETY: the kernel has filled so many.
            unsafe { messages.set_len(length / size_of::<uffd_msg>()) };
            Ok(messages)
        }
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(messages),
            error => Err(error),
        },
    }
}

/// Returns address, flags and thread of a page fault, or `None` for another event.
pub(crate) fn page_fault(message: &uffd_msg) -> Option<(u64, u64, u32)> {
    if u32::from(message.event) != raw::UFFD_EVENT_PAGEFAULT {
        return None;
    }
    // SAFETY: the event says that the kernel filled this member of the union. It fills the thread
    // too, as all our descriptors ask for it.
    unsafe {
        let fault = message.arg.pagefault;
        Some((fault.address, fault.flags, fault.feat.ptid))
    }
}

/// The state of a thread, which says whether a seccomp filter restricts its system calls.
#[derive(Debug)]
pub(crate) struct Filters(Option<File>);

impl Filters {
    /// Opens the state of this thread.
    pub(crate) fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/status").ok())
    }

    /// Returns whether a filter is there now. It may end the process for a call that it does not
    /// know.
    fn is_any(&self) -> bool {
        let mut status = [0; 4096];
        let read = self.0.as_ref().and_then(|file| file.read_at(&mut status, 0).ok());
        let mut lines = status[..read.unwrap_or(0)].split(|byte| *byte == b'\n');
        !lines.any(|line| line == b"Seccomp:\t0")
    }
}

/// As many calls as this take as long as a look at the filters.
const FEW: usize = 4;

/// Takes pages out of the page table, even if the program has locked them. Written bytes stay in
/// the file.
///
/// # Safety
/// The ranges of addresses must be of a shared mapping of a file.
pub(crate) unsafe fn unmap_pages(ranges: &[Range<usize>], filters: &Filters) -> io::Result<()> {
    // SAFETY: the caller's promise.
    if ranges.len() > FEW && !filters.is_any() && unsafe { unmap_together(ranges) } {
        return Ok(());
    }
    ranges.iter().try_for_each(|range| {
        let start = ptr::with_exposed_provenance_mut::<c_void>(range.start);
        let length = range.end - range.start;
        // SAFETY: the contents of a shared mapping are the file's, which this does not touch.
        let done = unsafe { libc::madvise(start, length, libc::MADV_DONTNEED_LOCKED) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    })
}

/// Does the same by one call for many ranges, with one flush of the TLBs of other processors.
/// Returns false if it took only some ranges out or none, as on a kernel that refuses the call for
/// the caller's own memory.
///
/// # Safety
/// As [`unmap_pages`].
unsafe fn unmap_together(ranges: &[Range<usize>]) -> bool {
    let part = |range: &Range<usize>| libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(range.start),
        iov_len: range.end - range.start,
    };
    ranges.chunks(libc::UIO_MAXIOV as usize).all(|ranges| {
        let parts: Vec<_> = ranges.iter().map(part).collect();
        let length: usize = parts.iter().map(|part| part.iov_len).sum();
        let (call, process) = (libc::SYS_process_madvise, raw::PIDFD_SELF_THREAD_GROUP);
        let advice = libc::MADV_DONTNEED_LOCKED;
        // SAFETY: the contents of a shared mapping are the file's, which this does not touch.
        let done =
            unsafe { libc::syscall(call, process, parts.as_ptr(), parts.len(), advice, 0_u32) };
        usize::try_from(done) == Ok(length)
    })
}

/// Makes the kernel refuse `MADV_REMOVE` in the range, which would take pages out of the file
/// without the engine. The kernel refuses it in locked memory (`EINVAL`). The lock brings no page
/// in.
///
/// # Safety
/// Only [`unmap_pages`] may take pages of the range out.
pub(crate) unsafe fn refuse_removal(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: present pages stay as they are, and absent pages stay absent.
    Ok(unsafe { rustix::mm::mlock_with(start, length, MlockFlags::ONFAULT) }?)
}

/// `SO_PEERPIDFD` of `asm-generic/socket.h`.
const PEER_PIDFD: libc::c_int = 77;

/// Returns a pidfd of the process that opened the other end of a unix socket.
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
    // SAFETY: the kernel made the descriptor for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Keeps the range out of children of this process, of which the engine would not know. Also keeps
/// huge pages out, until [`allow_huge_pages`] lets them in.
///
/// # Safety
/// No child of the process may use the range.
pub(crate) unsafe fn keep_to_this_process(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: neither call changes the bytes that this process sees.
    unsafe {
        rustix::mm::madvise(start, length, Advice::LinuxDontFork)?;
        rustix::mm::madvise(start, length, Advice::LinuxNoHugepage)?;
    }
    Ok(())
}

/// Lets the kernel use huge pages in the range, if the file system has them. A refusal only costs
/// time.
///
/// # Safety
/// The range must be mapped.
pub(crate) unsafe fn allow_huge_pages(address: usize, length: usize) {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: this changes no bytes.
    let _ = unsafe { rustix::mm::madvise(start, length, Advice::LinuxHugepage) };
}

/// Keeps new huge pages out of the range, and splits those that only this process has mapped. The
/// engine splits the others.
///
/// # Safety
/// The range must be mapped.
pub(crate) unsafe fn refuse_huge_pages(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: this changes no bytes.
    unsafe { rustix::mm::madvise(start, length, Advice::LinuxNoHugepage) }?;
    let end = address + length;
    let mut at = address;
    while at < end {
        let page = ptr::with_exposed_provenance_mut(at);
        // The kernel splits a huge page when it gets advice for a part of it. SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(page, PAGE_SIZE, Advice::LinuxCold) };
        at = (at / HUGE_PAGE_SIZE + 1) * HUGE_PAGE_SIZE;
    }
    Ok(())
}

/// Maps a part of a file in the place of the present mapping.
///
/// # Safety
/// The caller must own the present mapping. The range must read the same afterwards, or no thread
/// may read it meanwhile.
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

/// Brings the mapped pages into the page table, for reads.
///
/// # Safety
/// The range must be mapped.
pub(crate) unsafe fn populate(address: usize, length: usize) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(address);
    // SAFETY: reading changes nothing.
    Ok(unsafe { rustix::mm::madvise(start, length, Advice::LinuxPopulateRead) }?)
}

/// Returns the bytes mapped at an address, which must not change meanwhile.
///
/// # Safety
/// The range must stay mapped while it is borrowed, and writes to it must be held.
pub(crate) unsafe fn held<'a>(address: usize, length: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(address), length) }
}

/// Blocks all signals for this thread, and returns the mask of the signals blocked until then.
pub(crate) fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (std::mem::MaybeUninit::uninit(), std::mem::MaybeUninit::uninit());
    // SAFETY: both sets are filled by the calls before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

/// Restores the signal mask that [`block_signals`] returned.
pub(crate) fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: the set is complete.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
}

/// A file mapped into this process's memory, shared with all other mappings of the file.
#[derive(Debug)]
pub struct FileMap {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is only an address and a length; the memory is read and written as atomics.
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

    /// Maps the file without access until [`open_up`](Self::open_up). So not even the kernel
    /// touches it for a program that locks all its memory (`MCL_FUTURE`).
    pub(crate) fn closed(file: impl AsFd, length: usize) -> io::Result<Self> {
        Self::with(file, length, ProtFlags::empty())
    }

    fn with(file: impl AsFd, length: usize, protection: ProtFlags) -> io::Result<Self> {
        let start = aligned(length)?;
        // SAFETY: this replaces only the addresses reserved for it.
        let start = unsafe {
            rustix::mm::mmap(start, length, protection, MapFlags::SHARED | MapFlags::FIXED, file, 0)
        }?;
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, length })
    }

    pub(crate) fn open_up(&self) -> io::Result<()> {
        let protection = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the mapping is ours, and this removes no access.
        Ok(unsafe { rustix::mm::mprotect(self.start.as_ptr().cast(), self.length, protection) }?)
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// Returns all bytes. Other mappings may change them at any time.
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: it stays mapped for as long as the borrow, and atomics may be changed by others.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.length) }
    }

    /// Returns all memory as 64-bit words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: as above, and a mapping is aligned to pages.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.length / size_of::<u64>()) }
    }
}

impl AsRef<[AtomicU64]> for FileMap {
    fn as_ref(&self) -> &[AtomicU64] {
        self.words()
    }
}

/// Reserves addresses from a multiple of a huge page on, if there is room for one. Otherwise the
/// kernel could not map huge pages there.
fn aligned(length: usize) -> io::Result<*mut c_void> {
    let more = if length < HUGE_PAGE_SIZE { 0 } else { HUGE_PAGE_SIZE - PAGE_SIZE };
    let length = length.next_multiple_of(PAGE_SIZE);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses the address, so the mapping replaces nothing.
    let start = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), length + more, ProtFlags::empty(), flags)
    }?;
    let before = start.align_offset(HUGE_PAGE_SIZE).min(more);
    let first = start.wrapping_byte_add(before);
    for (at, length) in [(start, before), (first.wrapping_byte_add(length), more - before)] {
        if length > 0 {
            // SAFETY: both ends belong to the new mapping, and nothing uses them.
            unsafe { rustix::mm::munmap(at, length) }?;
        }
    }
    Ok(first)
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::sync::atomic::Ordering;
    use std::{mem, thread};

    use rustix::fs::MemfdFlags;

    use super::*;

    const PAGES: usize = 16;

    /// Lets the calling thread make any call but process_madvise(2), which ends the process.
    fn filter() {
        let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let number = mem::offset_of!(libc::seccomp_data, nr) as u32;
        let mut steps = [
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, number),
            step(libc::BPF_JMP | libc::BPF_JEQ, 0, 1, libc::SYS_process_madvise as u32),
            step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
            step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let len = steps.len() as u16;
        let program = libc::sock_fprog { len, filter: steps.as_mut_ptr() };
        // SAFETY: the kernel copies the program, which changes no memory.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
        }
    }

    /// Takes some pages of a mapping out of the page table. Checks that the others are there, and
    /// that the file still has all bytes.
    fn takes_out_some(filters: &Filters) {
        let file = File::from(rustix::fs::memfd_create("pages", MemfdFlags::empty()).unwrap());
        file.set_len((PAGES * PAGE_SIZE) as u64).unwrap();
        let map = FileMap::new(&file, PAGES * PAGE_SIZE).unwrap();
        let words = map.words();
        let word = |page: usize| &words[page * PAGE_SIZE / 8];
        (0..PAGES).for_each(|page| word(page).store(page as u64 + 1, Ordering::Relaxed));
        let at = |page: usize| map.address() + page * PAGE_SIZE;
        let odd: Vec<_> = (0..PAGES / 2).map(|pair| at(2 * pair + 1)..at(2 * pair + 2)).collect();
        assert!(odd.len() > FEW);
        // SAFETY: it is a shared mapping of a file.
        unsafe { unmap_pages(&odd, filters) }.unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let is_there = |page: usize| {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, (at(page) / PAGE_SIZE * 8) as u64).unwrap();
            u64::from_le_bytes(entry) >> 63 == 1
        };
        (0..PAGES).for_each(|page| assert_eq!(is_there(page), page % 2 == 0, "page {page}"));
        (0..PAGES).for_each(|page| assert_eq!(word(page).load(Ordering::Relaxed), page as u64 + 1));
    }

    #[test]
    fn pages_leave_the_page_table_and_stay_in_the_file() {
        takes_out_some(&Filters::of_this_thread());
    }

    #[test]
    fn a_thread_under_a_filter_makes_no_call_that_may_end_it() {
        let filtered = thread::spawn(|| {
            let filters = Filters::of_this_thread();
            filter();
            assert!(filters.is_any());
            takes_out_some(&filters);
        });
        filtered.join().unwrap();
    }
}
