//! The system calls that have no safe wrapper elsewhere. The only module of this crate with `unsafe`.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::AtomicU8;

use aquifer_page::PAGE_SIZE;
use rustix::mm::{MapFlags, ProtFlags};

pub(crate) use linux_raw_sys::general::page_region;
use linux_raw_sys::general::pm_scan_arg;

/// A file in this process's memory, shared with whoever else has it.
#[derive(Debug)]
pub(crate) struct Map {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is only an address and a length; what is there is read and written under the rules of its methods.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the file's first `length` bytes.
    pub(crate) fn new(file: impl AsFd, length: usize) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so nothing that is there is replaced.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length })
    }

    /// All of it, as bytes that anybody may change at any time.
    pub(crate) fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: it stays mapped for as long as the borrow, and atomics may be changed by others.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.length) }
    }

    /// Some pages of it.
    ///
    /// Only for pages that nobody can write to meanwhile: those that are in the file, and in no page table but ours.
    pub(crate) fn frozen(&self, first: u64, count: u64) -> &[u8] {
        let (start, length) = (first as usize * PAGE_SIZE, count as usize * PAGE_SIZE);
        assert!(start + length <= self.length, "pages {first}+{count} are not in the region");
        // SAFETY: within the mapping, which outlives the borrow. The engine hands out pages only while it has them taken out of
        // the program's page tables and serves no fault on them.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(start), length) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// `PAGE_IS_SWAPPED` of `linux/fs.h`: for a page that is not in the page table, that it is marked as not written to since it was
/// last put there clean.
pub(crate) const UNWRITTEN: u64 = 1 << 4;

const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const _: () = assert!(size_of::<pm_scan_arg>() == 96);

/// Which parts of a process's addresses `start..end` are of this category; as many of them as there is room for. Says how many, and
/// how far the kernel has looked.
pub(crate) fn scan(
    pagemap: impl AsFd,
    start: u64,
    end: u64,
    category: u64,
    into: &mut [page_region],
) -> io::Result<(usize, u64)> {
    let mut argument = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        vec: into.as_mut_ptr().expose_provenance() as u64,
        vec_len: into.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: category,
        category_anyof_mask: 0,
        return_mask: category,
    };
    // SAFETY: the request takes this structure, whose vector is ours and as long as it says.
    let found =
        unsafe { libc::ioctl(pagemap.as_fd().as_raw_fd(), PAGEMAP_SCAN, ptr::from_mut(&mut argument)) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok((found as usize, argument.walk_end)) }
}
