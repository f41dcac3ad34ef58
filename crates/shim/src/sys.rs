//! The kernel's calls themselves, as the C library's would be ours again. The only module of this crate, beside the exported functions,
//! with `unsafe`.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io;
use std::sync::OnceLock;

fn check(result: c_long) -> io::Result<c_long> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Sets `errno`.
pub(crate) fn set_errno(error: c_int) {
    // SAFETY: the C library says where this thread's is.
    unsafe { *libc::__errno_location() = error };
}

/// `mmap(2)`.
///
/// # Safety
/// As mmap.
pub(crate) unsafe fn mmap(
    address: usize,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, address, length, protection, flags, fd, offset) };
    check(mapped).map(|address| address as usize)
}

/// `munmap(2)`.
///
/// # Safety
/// As munmap.
pub(crate) unsafe fn munmap(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_munmap, address, length) }).map(|_| ())
}

/// `mremap(2)`.
///
/// # Safety
/// As mremap.
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

/// `madvise(2)`.
///
/// # Safety
/// As madvise.
pub(crate) unsafe fn madvise(address: usize, length: usize, advice: c_int) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) }).map(|_| ())
}

/// `fallocate(2)`.
pub(crate) fn fallocate(fd: c_int, mode: c_int, offset: i64, length: i64) -> io::Result<()> {
    // SAFETY: numbers only.
    check(unsafe { libc::syscall(libc::SYS_fallocate, fd, mode, offset, length) }).map(|_| ())
}

/// `ftruncate(2)`.
pub(crate) fn ftruncate(fd: c_int, length: i64) -> io::Result<()> {
    // SAFETY: numbers only.
    check(unsafe { libc::syscall(libc::SYS_ftruncate, fd, length) }).map(|_| ())
}

/// `openat(2)`: a descriptor, or -1 and `errno`.
///
/// # Safety
/// As openat.
pub(crate) unsafe fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_openat, directory, path, flags, mode) as c_int }
}

/// Where a function is that comes after this library's of the same name, as a number.
fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Whether any library of the program has this.
pub(crate) fn has(name: &CStr) -> bool {
    !next(name).is_null()
}

type Mallctl = unsafe extern "C" fn(*const c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int;

/// Has jemalloc make all its arenas now, and not each when the first thread wants it.
pub(crate) fn make_arenas() {
    // SAFETY: a function's address or none, and jemalloc's function of this name is of this type.
    let mallctl = unsafe { std::mem::transmute::<*mut c_void, Option<Mallctl>>(next(c"mallctl")) };
    let Some(mallctl) = mallctl else { return };
    let read = |name: &CStr| {
        let (mut value, mut size) = (0_u32, size_of::<u32>());
        // SAFETY: both names that are read are of unsigned numbers, and it writes no more than the size.
        let done = unsafe {
            mallctl(name.as_ptr(), (&raw mut value).cast(), &raw mut size, std::ptr::null_mut(), 0)
        };
        (done == 0).then_some(value)
    };
    let (Some(count), Some(mine)) = (read(c"opt.narenas"), read(c"thread.arena")) else { return };
    // A thread that goes to an arena has it made.
    for mut arena in (0..count).chain([mine]) {
        let (null, size) = (std::ptr::null_mut(), size_of::<u32>());
        // SAFETY: it reads an unsigned number.
        unsafe { mallctl(c"thread.arena".as_ptr(), null, null.cast(), (&raw mut arena).cast(), size) };
    }
}

type Fcntl = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;

/// `fcntl(2)`, by the C library, which knows which answers are errors.
///
/// # Safety
/// As fcntl.
pub(crate) unsafe fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    static NEXT: OnceLock<Option<Fcntl>> = OnceLock::new();
    // SAFETY: a function's address or none, and the C library's function of this name is of this type.
    let next =
        NEXT.get_or_init(|| unsafe { std::mem::transmute::<*mut c_void, Option<Fcntl>>(next(c"fcntl")) });
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

/// `fork(2)`, by the C library, which has others prepare for it.
pub(crate) fn fork() -> libc::pid_t {
    // SAFETY: a function's address or none, and the C library's function of this name is of this type.
    let next = unsafe { std::mem::transmute::<*mut c_void, Option<Fork>>(next(c"fork")) };
    next.map_or_else(
        || {
            set_errno(libc::ENOSYS);
            -1
        },
        |next| next(),
    )
}

/// Ends the program at once.
pub(crate) fn exit(code: c_int) -> ! {
    // SAFETY: it does not return.
    unsafe { libc::_exit(code) }
}

/// Lets go of an open file that this process has and does not use.
pub(crate) fn close(fd: c_int) {
    // SAFETY: numbers only.
    unsafe { libc::close(fd) };
}

/// Makes a mapping that nobody may touch one that may be: not locked, for locked pages cannot leave, and with this protection.
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

/// The size of an open file.
pub(crate) fn size(fd: c_int) -> Option<i64> {
    let mut is = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills it when it says so.
    unsafe { (libc::fstat(fd, is.as_mut_ptr()) == 0).then(|| is.assume_init().st_size) }
}
