//! The C library's functions that this library replaces.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::ops::Range;

use crate::{heap, regions, sys};

fn result(done: io::Result<()>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(error) => {
            sys::set_errno(error.raw_os_error().unwrap_or(libc::EIO));
            -1
        }
    }
}

fn pointer(done: io::Result<usize>) -> *mut c_void {
    match done {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address),
        Err(error) => {
            sys::set_errno(error.raw_os_error().unwrap_or(libc::EIO));
            libc::MAP_FAILED
        }
    }
}

fn range(address: *const c_void, length: usize) -> Range<usize> {
    let start = address.expose_provenance();
    start..start.saturating_add(length)
}

/// Maps as mmap(2). Anonymous memory may come from the heap, and a region's file goes to its
/// engine.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    if let Some(taken) = heap::map(length, protection, flags) {
        return pointer(taken);
    }
    let at = address.expose_provenance();
    // An anonymous mapping has no file, whatever its descriptor.
    let file = if flags & libc::MAP_ANONYMOUS == 0 { regions::region(fd) } else { None };
    let map = || match file {
        // SAFETY: the caller's promise.
        Some(region) => unsafe {
            regions::map(at, length, protection, flags, (fd, offset), region)
        },
        // SAFETY: the caller's promise.
        None => unsafe { sys::mmap(at, length, protection, flags, fd, offset) },
    };
    let replaces = flags & libc::MAP_FIXED != 0
        && flags & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE;
    if replaces && heap::part_of(&range(address, length)).is_some() {
        regions::tell("mmap cannot replace memory of a heap in a region");
        return pointer(Err(io::Error::from_raw_os_error(libc::EINVAL)));
    }
    pointer(if replaces { regions::release(&range(address, length), map) } else { map() })
}

/// Unmaps as munmap(2), and releases the parts of regions in the range first. Frees the part that
/// is in the heap.
///
/// # Safety
/// As munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: usize) -> c_int {
    let range = range(address, length);
    let unmap = |range: Range<usize>| {
        // SAFETY: the caller's promise.
        regions::release(&range, || unsafe { sys::munmap(range.start, range.end - range.start) })
    };
    let Some(part) = heap::part_of(&range) else { return result(unmap(range)) };
    let beside = [range.start..part.start, part.end..range.end];
    let done = beside.into_iter().filter(|beside| !beside.is_empty()).try_for_each(unmap);
    result(done.and_then(|()| heap::unmap(part)))
}

/// Remaps as mremap(2); fails with `EINVAL` if the old range overlaps a region.
///
/// # Safety
/// As mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    address: *mut c_void,
    old: usize,
    new: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    if regions::touches(&range(address, old)) {
        // At the new place the kernel would resolve faults without the engine, with zeroes.
        sys::set_errno(libc::EINVAL);
        return libc::MAP_FAILED;
    }
    // SAFETY: the caller's promise.
    let map = || unsafe {
        sys::mremap(address.expose_provenance(), old, new, flags, to.expose_provenance())
    };
    let fixed = flags & libc::MREMAP_FIXED != 0;
    pointer(if fixed { regions::release(&range(to, new), map) } else { map() })
}

/// Advises as madvise(2), adapted to regions and to the heap.
///
/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let range = range(address, length);
    match advice {
        // In the heap it discards, as for anonymous memory. A range that is only partly in the heap
        // goes to the kernel.
        libc::MADV_DONTNEED if heap::part_of(&range).is_some_and(|part| part == range) => {
            return result(regions::discard(&range).map(drop));
        }
        libc::MADV_FREE if heap::part_of(&range).is_some() => return 0,
        libc::MADV_REMOVE => match regions::discard(&range) {
            Ok(true) => return 0,
            Ok(false) => {}
            Err(error) => return result(Err(error)),
        },
        // Ignored in a region. It has huge pages only until pages move singly. Children must not
        // get the mapping. The engine brings pages on touch, and not in advance.
        libc::MADV_HUGEPAGE
        | libc::MADV_DOFORK
        | libc::MADV_WILLNEED
        | libc::MADV_POPULATE_READ
        | libc::MADV_POPULATE_WRITE
            if regions::touches(&range) =>
        {
            return 0;
        }
        _ => {}
    }
    // SAFETY: the caller's promise.
    result(unsafe { sys::madvise(range.start, length, advice) })
}

/// Allocates as fallocate(2); a hole or zeroed range in a region is discarded.
#[unsafe(no_mangle)]
pub extern "C" fn fallocate(fd: c_int, mode: c_int, offset: i64, length: i64) -> c_int {
    let Some(region) = regions::region(fd) else {
        return result(sys::fallocate(fd, mode, offset, length));
    };
    let frees = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
    if mode & frees != 0 {
        return result(regions::discard_in_file(&region, offset, length));
    }
    if mode & !libc::FALLOC_FL_KEEP_SIZE != 0 {
        sys::set_errno(libc::EOPNOTSUPP);
        return -1;
    }
    // A region is already allocated as a whole.
    0
}

/// Allocates as posix_fallocate(3).
#[unsafe(no_mangle)]
pub extern "C" fn posix_fallocate(fd: c_int, offset: i64, length: i64) -> c_int {
    if fallocate(fd, 0, offset, length) == 0 {
        return 0;
    }
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Truncates as ftruncate(2); a region keeps its size, and any other length fails with `EINVAL`.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate(fd: c_int, length: i64) -> c_int {
    if regions::region(fd).is_none() {
        return result(sys::ftruncate(fd, length));
    }
    if sys::size(fd) == Some(length) {
        return 0;
    }
    regions::tell(&format!("a region's size is fixed; create a region of {length} bytes instead"));
    sys::set_errno(libc::EINVAL);
    -1
}

/// Opens as openat(2), but never for direct I/O. For direct I/O, the kernel hands the current page
/// to a device, which may then read into a page that has left the region. Through the page cache
/// the kernel copies, and a copy faults like any other touch.
///
/// If the caller passes no mode, `mode` holds an undefined value, which the kernel ignores.
///
/// # Safety
/// As openat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { sys::openat(directory, path, flags & !libc::O_DIRECT, mode) }
}

/// Opens as open(2), without direct I/O, as [`openat`].
///
/// # Safety
/// As open(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { openat(libc::AT_FDCWD, path, flags, mode) }
}

/// Opens without a mode. Programs built with `_FORTIFY_SOURCE` call this in place of `open`.
///
/// # Safety
/// As open(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { openat(libc::AT_FDCWD, path, flags, 0) }
}

/// Opens as [`__open_2`], relative to a directory.
///
/// # Safety
/// As openat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __openat_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { openat(directory, path, flags, 0) }
}

/// Controls as fcntl(2), but `F_SETFL` never sets `O_DIRECT`: see [`openat`].
///
/// # Safety
/// As fcntl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    let argument =
        if command == libc::F_SETFL { argument & !(libc::O_DIRECT as usize) } else { argument };
    // SAFETY: the caller's promise.
    unsafe { sys::fcntl(fd, command, argument) }
}

/// Forks as fork(2). Fails with `ENOMEM` if the heap is in a region, as the child would not have
/// it.
#[unsafe(no_mangle)]
pub extern "C" fn fork() -> libc::pid_t {
    if heap::is_there() {
        regions::tell(
            "a program with its heap in a region cannot fork; use vfork or posix_spawn instead",
        );
        sys::set_errno(libc::ENOMEM);
        return -1;
    }
    sys::fork()
}

/// Exports functions under their names for 64-bit offsets too: offsets have 64 bits anyway.
macro_rules! also {
    ($($name:ident = $of:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        #[doc = concat!("Another name of [`", stringify!($of), "`].\n\n# Safety\nAs there.")]
        #[allow(unused_unsafe, reason = "some of the functions are safe")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the caller's promise.
            unsafe { $of($($argument),*) }
        }
    )*};
}

also! {
    mmap64 = mmap(
        at: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64
    ) -> *mut c_void;
    fallocate64 = fallocate(fd: c_int, mode: c_int, offset: i64, length: i64) -> c_int;
    posix_fallocate64 = posix_fallocate(fd: c_int, offset: i64, length: i64) -> c_int;
    ftruncate64 = ftruncate(fd: c_int, length: i64) -> c_int;
    openat64 = openat(
        directory: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t
    ) -> c_int;
    open64 = open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int;
    __open64_2 = __open_2(path: *const c_char, flags: c_int) -> c_int;
    __openat64_2 = __openat_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int;
    fcntl64 = fcntl(fd: c_int, command: c_int, argument: usize) -> c_int;
}
