//! The system calls that have no safe wrapper elsewhere. The only module of this crate with `unsafe`.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _};
use std::ptr;
use std::slice;

use aquifer_mapping::FileMap;
use aquifer_page::PAGE_SIZE;

pub(crate) use linux_raw_sys::general::page_region;
use linux_raw_sys::general::pm_scan_arg;

/// Some pages of a mapped file, as bytes that do not change.
///
/// Only for pages that nobody can write to meanwhile: those that are in the file, and in no page table but ours.
pub(crate) fn frozen(map: &FileMap, first: u64, count: u64) -> &[u8] {
    let (start, length) = (first as usize * PAGE_SIZE, count as usize * PAGE_SIZE);
    let bytes = &map.bytes()[start..start + length];
    // SAFETY: the same bytes, borrowed for as long. The engine hands out pages only while it has them taken out of the
    // programs' page tables and serves no fault on them.
    unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), length) }
}

/// Bits of `linux/fs.h`: the kernel marks writes to the page; a write came since the mark was armed;
/// the page is in the page table; its entry there holds something else than a page.
const PAGE_IS_WPALLOWED: u64 = 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// `PM_SCAN_WP_MATCHING` of `linux/fs.h`: the next write is to be noticed.
const PM_SCAN_WP_MATCHING: u64 = 1;

const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const _: () = assert!(size_of::<pm_scan_arg>() == 96);

/// Finds parts of a process's addresses whose marks say that no write came since they were armed; as
/// many parts as there is room for. Says how many, and how far the kernel has looked.
///
/// The mark stands in the page's entry, also when the page is not in the page table. An empty entry
/// is no mark, nor is that of a poisoned page or of one that the kernel is just moving. In a mapping
/// without write tracking there are none.
pub(crate) fn scan_unwritten(
    pagemap: impl AsFd,
    addresses: Range<u64>,
    into: &mut [page_region],
) -> io::Result<(usize, u64)> {
    let argument = pm_scan_arg {
        vec: into.as_mut_ptr().expose_provenance() as u64,
        vec_len: into.len() as u64,
        category_inverted: PAGE_IS_WRITTEN,
        category_mask: PAGE_IS_WPALLOWED | PAGE_IS_WRITTEN,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_WPALLOWED,
        ..scan_of(addresses)
    };
    // SAFETY: the vector is ours, and as long as it says.
    unsafe { scan(pagemap, argument) }
}

/// Finds parts of a process's addresses that are in its page table, as [`scan_unwritten`] finds others.
pub(crate) fn scan_present(
    pagemap: impl AsFd,
    addresses: Range<u64>,
    into: &mut [page_region],
) -> io::Result<(usize, u64)> {
    let argument = pm_scan_arg {
        vec: into.as_mut_ptr().expose_provenance() as u64,
        vec_len: into.len() as u64,
        category_mask: PAGE_IS_PRESENT,
        return_mask: PAGE_IS_PRESENT,
        ..scan_of(addresses)
    };
    // SAFETY: the vector is ours, and as long as it says.
    unsafe { scan(pagemap, argument) }
}

/// Arms the marks of these pages, whether they are in the page table or not. Mappings without write
/// tracking stay as they are. Says how far the kernel came.
pub(crate) fn notice_writes(pagemap: impl AsFd, addresses: Range<u64>) -> io::Result<u64> {
    let argument = pm_scan_arg { flags: PM_SCAN_WP_MATCHING, ..scan_of(addresses) };
    // SAFETY: there is no vector.
    unsafe { scan(pagemap, argument) }.map(|(_, walked)| walked)
}

fn scan_of(Range { start, end }: Range<u64>) -> pm_scan_arg {
    pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        vec: 0,
        vec_len: 0,
        max_pages: 0,
        category_inverted: 0,
        category_mask: 0,
        category_anyof_mask: 0,
        return_mask: 0,
    }
}

/// # Safety
/// The vector that is named must be as long as is said, and the caller's to have filled.
unsafe fn scan(pagemap: impl AsFd, mut argument: pm_scan_arg) -> io::Result<(usize, u64)> {
    // SAFETY: the request takes this structure; the rest is the caller's promise.
    let found = unsafe {
        libc::ioctl(pagemap.as_fd().as_raw_fd(), PAGEMAP_SCAN, ptr::from_mut(&mut argument))
    };
    if found < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok((found as usize, argument.walk_end))
    }
}

/// Tells the scheduler that this thread runs for a moment at a time, so that it need not wait for who runs for longer (Linux 6.12; before,
/// nothing changes).
pub(crate) fn be_short() {
    const SLICE: u64 = 100_000;
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: rustix::process::getpriority_process(None).unwrap_or(0),
        sched_priority: 0,
        sched_runtime: SLICE,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the structure is one that the kernel only reads, and says how long it is. Where it is refused, all is as it was.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Mappings of programs that tests play.
#[cfg(test)]
pub(crate) mod test {
    use std::ops::Range;
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicU64;
    use std::{io, ptr, slice};

    use aquifer_page::PAGE_SIZE;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

    /// A file in the memory of a program that can end before its process does: nothing else is mapped there then.
    #[derive(Debug)]
    pub(crate) struct Mapping {
        /// With a page before the file, which keeps what is left there from looking like it.
        start: usize,
        length: usize,
    }

    impl Mapping {
        pub(crate) fn new(file: impl AsFd, length: usize) -> io::Result<Self> {
            let none = ProtFlags::empty();
            // SAFETY: the kernel chooses the address, so nothing that is there is replaced.
            let start = unsafe {
                mmap_anonymous(ptr::null_mut(), length + PAGE_SIZE, none, MapFlags::PRIVATE)
            }?;
            let mapping = Self { start: start.expose_provenance(), length };
            let (at, both) = (mapping.pointer(), ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: what is replaced was mapped just now.
            unsafe { mmap(at, length, both, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
            Ok(mapping)
        }

        pub(crate) fn address(&self) -> usize {
            self.start + PAGE_SIZE
        }

        fn pointer(&self) -> *mut std::ffi::c_void {
            ptr::with_exposed_provenance_mut(self.address())
        }

        pub(crate) fn words(&self) -> &[AtomicU64] {
            // SAFETY: it is mapped until this ends, and atomics may be changed by others.
            unsafe { slice::from_raw_parts(self.pointer().cast(), self.length / size_of::<u64>()) }
        }

        /// Takes pages out of the page table, as a program may at any time.
        pub(crate) fn drop_entries(&self, pages: Range<u64>) {
            let start = self.address() + pages.start as usize * PAGE_SIZE;
            let length = (pages.end - pages.start) as usize * PAGE_SIZE;
            // SAFETY: the contents of a shared mapping are the file's, which this does not touch.
            let dropped = unsafe {
                madvise(ptr::with_exposed_provenance_mut(start), length, Advice::LinuxDontNeed)
            };
            dropped.expect("the pages are mapped");
        }

        /// Maps pages of a file in the place of these, from this page of it on, and brings private ones
        /// into the page table.
        pub(crate) fn replace(
            &self,
            pages: Range<u64>,
            (file, first): (impl AsFd, u64),
            kind: MapFlags,
            before_touch: impl FnOnce(u64, u64) -> io::Result<()>,
        ) -> io::Result<()> {
            let start = self.address() + pages.start as usize * PAGE_SIZE;
            let length = (pages.end - pages.start) as usize * PAGE_SIZE;
            let (at, both) =
                (ptr::with_exposed_provenance_mut(start), ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: what is replaced is of this mapping, and what is there is read as atomics only.
            unsafe {
                mmap(at, length, both, kind | MapFlags::FIXED, file, first * PAGE_SIZE as u64)
            }?;
            before_touch(start as u64, length as u64)?;
            if kind == MapFlags::PRIVATE {
                // SAFETY: reading changes nothing.
                unsafe { madvise(at, length, Advice::LinuxPopulateRead) }?;
            }
            Ok(())
        }

        /// Unmaps the file.
        pub(crate) fn end(self) -> io::Result<Ended> {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            // SAFETY: this is the end of what gives access to it.
            unsafe { mmap_anonymous(self.pointer(), self.length, ProtFlags::empty(), flags) }?;
            Ok(Ended { _mapping: self })
        }
    }

    /// The addresses at which a file was mapped. Nothing is there.
    #[derive(Debug)]
    pub(crate) struct Ended {
        _mapping: Mapping,
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            let start = ptr::with_exposed_provenance_mut(self.start);
            // SAFETY: it is ours, and nothing borrows it any more.
            let _ = unsafe { munmap(start, self.length + PAGE_SIZE) };
        }
    }
}
