//! The kernel's calls without the C library's wrappers, which this library replaces.
//! `libc::syscall` reaches the kernel directly.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io;
use std::sync::OnceLock;

fn check(result: c_long) -> io::Result<c_long> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Sets this thread's `errno`.
pub(crate) fn set_errno(error: c_int) {
    // SAFETY: the C library returns the address of this thread's `errno`.
    unsafe { *libc::__errno_location() = error };
}

/// Calls mmap(2).
///
/// # Safety
/// As mmap(2).
pub(crate) unsafe fn mmap(
    address: usize,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    let mapped =
        unsafe { libc::syscall(libc::SYS_mmap, address, length, protection, flags, fd, offset) };
    check(mapped).map(|address| address as usize)
}

/// Calls munmap(2).
///
/// # Safety
/// As munmap(2).
pub(crate) unsafe fn munmap(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_munmap, address, length) }).map(|_| ())
}

/// Calls mremap(2).
///
/// # Safety
/// As mremap(2).
pub(crate) unsafe fn mremap(
    from: usize,
    old: usize,
    new: usize,
    flags: c_int,
    to: usize,
) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_mremap, from, old, new, flags, to) })
        .map(|address| address as usize)
}

/// Calls madvise(2).
///
/// # Safety
/// As madvise(2).
pub(crate) unsafe fn madvise(address: usize, length: usize, advice: c_int) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) }).map(|_| ())
}

/// Calls fallocate(2).
pub(crate) fn fallocate(fd: c_int, mode: c_int, offset: i64, length: i64) -> io::Result<()> {
    // SAFETY: numbers only.
    check(unsafe { libc::syscall(libc::SYS_fallocate, fd, mode, offset, length) }).map(|_| ())
}

/// Calls ftruncate(2).
pub(crate) fn ftruncate(fd: c_int, length: i64) -> io::Result<()> {
    // SAFETY: numbers only.
    check(unsafe { libc::syscall(libc::SYS_ftruncate, fd, length) }).map(|_| ())
}

/// Calls openat(2). Returns a descriptor, or -1 with `errno` set.
///
/// # Safety
/// As openat(2).
pub(crate) unsafe fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_openat, directory, path, flags, mode) as c_int }
}

/// Returns the address of the next function of this name in load order after this library's.
fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Returns whether a library of the program defines this symbol.
pub(crate) fn has(name: &CStr) -> bool {
    !next(name).is_null()
}

type Mallctl =
    unsafe extern "C" fn(*const c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int;

/// Makes jemalloc create all its arenas now, and not at the first use by a thread.
pub(crate) fn make_arenas() {
    // SAFETY: the value is a function's address or null, and jemalloc's `mallctl` has this type.
    let mallctl = unsafe { std::mem::transmute::<*mut c_void, Option<Mallctl>>(next(c"mallctl")) };
    let Some(mallctl) = mallctl else { return };
    let read = |name: &CStr| {
        let (mut value, mut size) = (0_u32, size_of::<u32>());
        // SAFETY: both names hold unsigned numbers, and `mallctl` writes no more than the size.
        let done = unsafe {
            mallctl(name.as_ptr(), (&raw mut value).cast(), &raw mut size, std::ptr::null_mut(), 0)
        };
        (done == 0).then_some(value)
    };
    let (Some(count), Some(mine)) = (read(c"opt.narenas"), read(c"thread.arena")) else { return };
    // jemalloc creates an arena when a thread switches to it. The last step returns this thread to
    // its own.
    for mut arena in (0..count).chain([mine]) {
        let (null, size) = (std::ptr::null_mut(), size_of::<u32>());
        // SAFETY: it reads an unsigned number.
        unsafe {
            mallctl(c"thread.arena".as_ptr(), null, null.cast(), (&raw mut arena).cast(), size)
        };
    }
}

type Fcntl = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;

/// Calls fcntl(2) through the C library, which knows which results are errors.
///
/// # Safety
/// As fcntl(2).
pub(crate) unsafe fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    static NEXT: OnceLock<Option<Fcntl>> = OnceLock::new();
    // SAFETY: the value is a function's address or null, and the C library's `fcntl` has this type.
    let next = NEXT.get_or_init(|| unsafe {
        std::mem::transmute::<*mut c_void, Option<Fcntl>>(next(c"fcntl"))
    });
    match next {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(fd, command, argument) },
        None => {
            set_errno(libc::ENOSYS);
            -1
        }
    }
}

type Fork = extern "C" fn() -> libc::pid_t;

/// Calls fork(2) through the C library, which runs the handlers of pthread_atfork(3).
pub(crate) fn fork() -> libc::pid_t {
    // SAFETY: the value is a function's address or null, and the C library's `fork` has this type.
    let next = unsafe { std::mem::transmute::<*mut c_void, Option<Fork>>(next(c"fork")) };
    next.map_or_else(
        || {
            set_errno(libc::ENOSYS);
            -1
        },
        |next| next(),
    )
}

/// Ends the program at once, without exit handlers.
pub(crate) fn exit(code: c_int) -> ! {
    // SAFETY: it does not return.
    unsafe { libc::_exit(code) }
}

/// Closes a descriptor that this process inherited and does not use.
pub(crate) fn close(fd: c_int) {
    // SAFETY: numbers only.
    unsafe { libc::close(fd) };
}

/// Makes an inaccessible mapping accessible with this protection. Also unlocks it, as locked pages
/// cannot leave.
///
/// # Safety
/// The range must be a mapping of the caller's.
pub(crate) unsafe fn open_up(address: usize, length: usize, protection: c_int) -> io::Result<()> {
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: the caller's promise.
    unsafe {
        check(libc::munlock(start, length).into())?;
        check(libc::mprotect(start, length, protection).into())?;
    }
    Ok(())
}

/// Returns the size of an open file in bytes.
pub(crate) fn size(fd: c_int) -> Option<i64> {
    let mut is = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fstat` fills the structure if it returns 0.
    unsafe { (libc::fstat(fd, is.as_mut_ptr()) == 0).then(|| is.assume_init().st_size) }
}

/// A flag for [`refuse_pinning`]: the filter applies to all threads of the process.
pub(crate) const ALL_THREADS: libc::c_ulong = libc::SECCOMP_FILTER_FLAG_TSYNC;

/// Makes calls fail with `EOPNOTSUPP` that let the kernel or a device use memory for long,
/// regardless of the page table.
///
/// These are `io_uring_register` of buffers (`linux/io_uring.h`: `IORING_REGISTER_BUFFERS`,
/// `BUFFERS2`, `BUFFERS_UPDATE` and `CLONE_BUFFERS`), and two `ioctl`s. The latter are
/// `VFIO_IOMMU_MAP_DMA` (`linux/vfio.h`) and `IOMMU_IOAS_MAP` (`linux/iommufd.h`).
///
/// # Errors
/// The kernel refuses the filter, or a thread has a filter of its own.
pub(crate) fn refuse_pinning(flags: libc::c_ulong) -> io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // Offsets in `struct seccomp_data`: the call's number, and the lower half of its second
    // argument.
    const NUMBER: u32 = 0;
    const SECOND: u32 = 24 + if cfg!(target_endian = "big") { 4 } else { 0 };
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EOPNOTSUPP as u32;
    let step = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let is = |k, jt, jf| libc::sock_filter { code: IS, jt, jf, k };
    let mut filter = [
        step(LOAD, NUMBER),
        is(libc::SYS_io_uring_register as u32, 1, 0),
        is(libc::SYS_ioctl as u32, 6, 9),
        step(LOAD, SECOND),
        // Bit 31 only says how the caller names the ring (`IORING_REGISTER_USE_REGISTERED_RING`).
        step(AND, 0x7fff_ffff),
        is(0, 7, 0),
        is(15, 6, 0),
        is(16, 5, 0),
        is(30, 4, 3),
        step(LOAD, SECOND),
        is(0x3b71, 2, 0),
        is(0x3b85, 1, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW),
        step(RETURN, REFUSE),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let set = || {
        // SAFETY: the kernel only reads the program, and its length field is right.
        let set = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const program,
            )
        };
        match check(set) {
            Ok(0) => Ok(()),
            Ok(thread) => Err(io::Error::other(format!("thread {thread} has a filter of its own"))),
            Err(error) => Err(error),
        }
    };
    match set() {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            // SAFETY: numbers only. The process gives up only privileges that programs gain by
            // execve(2).
            check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
            set()
        }
        done => done,
    }
}
