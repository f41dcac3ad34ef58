//! Pages of another file in the place of pages of the region.
//!
//! A shared page is mapped private, and guarded: nobody's write gets through to it, or to a copy that the engine would know nothing of. A write
//! is held and told by a fault, and goes on when the region's own page is mapped again. Between the call that maps the page and the one that
//! guards it a write can slip through; it is found before anybody hears that the page is shared.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;

use aquifer_page::PAGE_SIZE;
use rustix::mm::MapFlags;

use crate::sys;
use crate::userfault::Userfault;

/// Of an entry of `/proc/PID/pagemap` (admin-guide/mm/pagemap.rst): the page is in the page table, a page of a file, and writes to it are
/// held.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
const HELD: u64 = 1 << 57;

/// What shares pages of this process.
#[derive(Debug)]
pub(crate) struct Sharing {
    pub(crate) guard: Userfault,
    pagemap: File,
}

impl Sharing {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { guard: Userfault::guard()?, pagemap: File::open("/proc/self/pagemap")? })
    }

    /// Maps a part of `file` at these addresses. Says at which of them it is not shared, because it was written to meanwhile or the kernel has
    /// no memory to guard it; where there is an error all is as it was.
    ///
    /// # Safety
    /// They must be of a region, none in the page table, and read the same in the file.
    pub(crate) unsafe fn share(
        &self,
        at: &Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<Vec<usize>> {
        // SAFETY: the caller's promise.
        unsafe { sys::replace(at.start, at.end - at.start, file, offset, MapFlags::PRIVATE) }?;
        let mut entries = vec![0; (at.end - at.start) / PAGE_SIZE];
        // SAFETY: it was mapped just now.
        if unsafe { self.guard(at, &mut entries) }.is_err() {
            entries.fill(0);
        }
        let addresses = at.clone().step_by(PAGE_SIZE);
        const ALL: u64 = PRESENT | OF_FILE | HELD;
        Ok(addresses
            .zip(entries)
            .filter(|(_, entry)| entry & ALL != ALL)
            .map(|(address, _)| address)
            .collect())
    }

    /// Has writes to these pages be held, and says how the kernel has them.
    ///
    /// # Safety
    /// They must be of a private mapping of a file.
    unsafe fn guard(&self, at: &Range<usize>, entries: &mut [u64]) -> io::Result<()> {
        let length = at.end - at.start;
        // SAFETY: the caller's promise.
        unsafe {
            self.guard.protect(at.start as u64, length as u64)?;
            sys::keep_to_this_process(at.start, length)?;
            sys::populate(at.start, length)?;
        }
        let mut bytes = vec![0; size_of_val(entries)];
        self.pagemap.read_exact_at(&mut bytes, (at.start / PAGE_SIZE * size_of::<u64>()) as u64)?;
        for (entry, bytes) in entries.iter_mut().zip(bytes.as_chunks().0) {
            *entry = u64::from_ne_bytes(*bytes);
        }
        Ok(())
    }
}

/// Maps the region's own pages at these addresses again.
///
/// # Safety
/// They must be of a region, and the pages be in its file as they are read here.
pub(crate) unsafe fn restore(
    at: &Range<usize>,
    region: BorrowedFd<'_>,
    offset: u64,
    userfault: &Userfault,
) -> io::Result<()> {
    let length = at.end - at.start;
    // SAFETY: the caller's promise, for these calls.
    unsafe {
        sys::replace(at.start, length, region, offset, MapFlags::SHARED)?;
        sys::keep_to_this_process(at.start, length)?;
        userfault.register(at.start as u64, length as u64)
    }
}

/// Puts what is read at an address into the region's file.
///
/// # Safety
/// It must be mapped, and writes to it held. (Where the kernel had no memory to hold them, one that comes just now is lost, or torn.)
pub(crate) unsafe fn take_back(
    address: usize,
    region: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<()> {
    // SAFETY: the caller's promise.
    let page = unsafe { sys::held(address, PAGE_SIZE) };
    let mut done = 0;
    while done < PAGE_SIZE {
        let written = rustix::io::pwrite(region, &page[done..], offset + done as u64)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        done += written;
    }
    Ok(())
}
