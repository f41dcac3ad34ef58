//! The regions that this program has mapped.

use std::ffi::c_int;
use std::fs;
use std::io;
use std::ops::Range;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

use aquifer_page::PAGE_SIZE;
use aquifer_region_client::{Mapping, Opened, Run};

use crate::{pinning, sys};

static MAPPINGS: RwLock<Vec<Mapping>> = RwLock::new(Vec::new());

/// The id of the process that owns the mappings; 0 while there are none.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns the mappings that overlap these addresses. Allocates nothing if there are none, as
/// allocators call this too.
///
/// A forked child has no mappings and skips the lock. Another thread may have held the lock during
/// the fork, and that thread is absent in the child.
fn mappings(range: &Range<usize>) -> Vec<Mapping> {
    let owner = OWNER.load(Ordering::Relaxed);
    if owner == 0 || owner != process::id() {
        return Vec::new();
    }
    let all = MAPPINGS.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter(|mapping| mapping.has_part_of(range)).cloned().collect()
}

/// Returns the region behind the open file, with the file's offset in it.
pub(crate) fn region(fd: c_int) -> Option<Opened> {
    if fd < 0 {
        return None;
    }
    Opened::of(&fs::read_link(format!("/proc/self/fd/{fd}")).ok()?)
}

/// Maps a part of a region. The mapping is inaccessible until the engine has adopted it.
///
/// # Safety
/// As mmap(2).
pub(crate) unsafe fn map(
    address: usize,
    length: usize,
    protection: c_int,
    flags: c_int,
    (fd, offset): (c_int, i64),
    Opened { socket, offset: first }: Opened,
) -> io::Result<usize> {
    if flags & libc::MAP_TYPE == libc::MAP_PRIVATE {
        tell("a region must be mapped shared; a private mapping reads absent pages as zeroes");
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    pinning::refuse();
    let offset = offset + first as i64;
    let whole = length.next_multiple_of(PAGE_SIZE);
    let flags = flags & !(libc::MAP_POPULATE | libc::MAP_LOCKED);
    // SAFETY: the caller's promise. With `PROT_NONE` not even a program that locks all its memory
    // touches a page.
    let mapped = unsafe { sys::mmap(address, length, libc::PROT_NONE, flags, fd, offset) }?;
    // SAFETY: it is a new shared mapping of the region, of the whole length. Only this module
    // unmaps it.
    let adopted =
        unsafe { Mapping::adopt(mapped, whole, offset as u64 / PAGE_SIZE as u64, &socket, false) };
    match adopted {
        Ok(mapping) => {
            take_in(mapping);
            // SAFETY: the mapping belongs to this program.
            unsafe { sys::open_up(mapped, whole, protection) }?;
            Ok(mapped)
        }
        Err(error) => {
            tell(&error.to_string());
            // SAFETY: this function mapped it above.
            let _ = unsafe { sys::munmap(mapped, whole) };
            Err(io::Error::from_raw_os_error(libc::EIO))
        }
    }
}

fn take_in(mapping: Mapping) {
    let mut all = MAPPINGS.write().unwrap_or_else(PoisonError::into_inner);
    // In a forked child, the parent's mappings do not exist.
    all.retain(Mapping::is_mine);
    all.push(mapping);
    OWNER.store(process::id(), Ordering::Relaxed);
}

/// Runs `unmap`, which unmaps or replaces these addresses, after the engines have released their
/// parts.
pub(crate) fn release<T>(
    range: &Range<usize>,
    unmap: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let here = mappings(range);
    if here.is_empty() {
        return unmap();
    }
    let done = nested(&here, range, unmap);
    MAPPINGS.write().unwrap_or_else(PoisonError::into_inner).retain(Mapping::is_mapped);
    done
}

fn nested<T>(
    mappings: &[Mapping],
    range: &Range<usize>,
    unmap: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    match mappings.split_first() {
        None => unmap(),
        Some((first, rest)) => first.release(range, || nested(rest, range, unmap)),
    }
}

/// Returns whether any of these addresses belongs to a region.
pub(crate) fn touches(range: &Range<usize>) -> bool {
    !mappings(range).is_empty()
}

/// Discards the parts of these addresses that belong to regions. Returns false if there are none.
pub(crate) fn discard(range: &Range<usize>) -> io::Result<bool> {
    let mut any = false;
    for mapping in mappings(range) {
        for part in mapping.parts_of(range) {
            mapping.discard_at(&part)?;
            any = true;
        }
    }
    Ok(any)
}

/// Discards the whole pages within these bytes of a region's file.
///
/// # Errors
/// `EOPNOTSUPP` if this program does not have the region mapped.
pub(crate) fn discard_in_file(region: &Opened, offset: i64, length: i64) -> io::Result<()> {
    let page = PAGE_SIZE as u64;
    let offset = region.offset + offset as u64;
    let (first, end) = (offset.div_ceil(page), offset.saturating_add(length as u64) / page);
    let Some(mapping) =
        mappings(&(0..usize::MAX)).into_iter().find(|mapping| mapping.socket() == region.socket)
    else {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    };
    if first >= end { Ok(()) } else { mapping.discard(Run { first, count: end - first }) }
}

/// Prints a message for the program's operator to stderr.
pub(crate) fn tell(message: &str) {
    eprintln!("aquifer: {message}");
}
