//! The system calls that have no safe wrapper elsewhere. All `unsafe` code of this crate outside
//! tests is here.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _};
use std::ptr;

use aquifer_page::PAGE_SIZE;
use aquifer_region_client::FileMap;

pub(crate) use linux_raw_sys::general::page_region;
use linux_raw_sys::general::pm_scan_arg;

/// Advises the kernel on pages of a mapped file, as madvise(2). The advice must not change the
/// content of a shared mapping.
pub(crate) fn advise(map: &FileMap, pages: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
    let length = (pages.end - pages.start) as usize * PAGE_SIZE;
    let bytes = &map.bytes()[pages.start as usize * PAGE_SIZE..][..length];
    // SAFETY: the mapping is ours, and keeps its content.
    let done = unsafe { libc::madvise(bytes.as_ptr().cast_mut().cast(), length, advice) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Page categories of `linux/fs.h`: the kernel tracks writes to the page; a write came since the
/// mark was armed. The page is in the page table; its entry holds no page but a swap entry or a
/// marker.
const PAGE_IS_WPALLOWED: u64 = 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// `PM_SCAN_WP_MATCHING` of `linux/fs.h`: arms the marks of the matching pages.
const PM_SCAN_WP_MATCHING: u64 = 1;

const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const _: () = assert!(size_of::<pm_scan_arg>() == 96);

/// Finds ranges of a process's addresses with marks that prove no write since they were armed.
/// Fills `into` as far as it has room. Returns the number of ranges, and the address at which the
/// scan ended.
///
/// A mark stands in the page table entry, even if the page itself is not there. An empty entry is
/// no mark, nor is the entry of a poisoned page or of a page under migration. A mapping without
/// write tracking has no marks.
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

/// Finds ranges of a process's addresses that are in its page table, as [`scan_unwritten`] finds
/// others.
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

/// Arms the marks of these addresses, whether the pages are in the page table or not. Mappings
/// without write tracking stay unchanged. Returns the address that the kernel reached.
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
/// The vector must be as long as the argument says, and the caller's to be written.
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

/// Asks the scheduler for short time slices for this thread. It then waits less for threads that
/// run longer (Linux 6.12; older kernels ignore it).
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
    // SAFETY: the kernel only reads the structure, which states its size. A refusal changes
    // nothing.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Mappings for the programs that tests play.
#[cfg(test)]
pub(crate) mod test {
    use std::ops::Range;
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicU64;
    use std::{io, ptr, slice};

    use aquifer_page::PAGE_SIZE;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

    /// A file in the memory of a program that can end before its process. Its addresses stay
    /// reserved then.
    #[derive(Debug)]
    pub(crate) struct Mapping {
        /// The start of the reservation: one page before the file, which separates it from mappings
        /// below.
        start: usize,
        length: usize,
    }

    impl Mapping {
        pub(crate) fn new(file: impl AsFd, length: usize) -> io::Result<Self> {
            let none = ProtFlags::empty();
            // SAFETY: the kernel chooses the address, so the mapping replaces nothing.
            let start = unsafe {
                mmap_anonymous(ptr::null_mut(), length + PAGE_SIZE, none, MapFlags::PRIVATE)
            }?;
            let mapping = Self { start: start.expose_provenance(), length };
            let (at, both) = (mapping.pointer(), ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: this replaces only the reservation made above.
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
            // SAFETY: it is mapped until this is dropped, and atomics may be changed by others.
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

        /// Maps pages of a file in the place of these, from page `first` of the file on. Brings
        /// private pages into the page table.
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
            // SAFETY: this replaces part of this mapping, and its memory is read as atomics only.
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

        /// Unmaps the file, and keeps its addresses reserved.
        pub(crate) fn end(self) -> io::Result<Ended> {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            // SAFETY: this consumes the only handle to the memory.
            unsafe { mmap_anonymous(self.pointer(), self.length, ProtFlags::empty(), flags) }?;
            Ok(Ended { _mapping: self })
        }
    }

    /// The reserved addresses of a file that is no longer mapped.
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
