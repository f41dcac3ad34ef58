//! Pages of another file in the place of pages of the region.
//!
//! A shared page is mapped private and guarded. So no write reaches the page itself, nor a private
//! copy of which the engine would not know. The kernel holds a write and reports it by a fault; the
//! write continues once the region's own page is mapped again. A write can slip through between the
//! call that maps the page and the call that guards it. [`Sharing::share`] finds such a write
//! before the engine hears that the page is shared.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;

use aquifer_page::PAGE_SIZE;
use rustix::mm::MapFlags;

use crate::sys;
use crate::userfault::Userfault;

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst): the page is
/// present, it is file-mapped, and it is write-protected by userfaultfd.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
const HELD: u64 = 1 << 57;

/// The guard of this process's shared pages, and the file by which it checks them.
#[derive(Debug)]
pub(crate) struct Sharing {
    pub(crate) guard: Userfault,
    pagemap: File,
}

impl Sharing {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { guard: Userfault::guard()?, pagemap: File::open("/proc/self/pagemap")? })
    }

    /// Maps a part of `file` at these addresses, guarded against writes. Returns the addresses of
    /// the pages that are not shared, because of a write meanwhile or lack of memory for the guard.
    ///
    /// # Errors
    /// The kernel cannot map the file; the old mapping is unchanged.
    ///
    /// # Safety
    /// The addresses must be of a region, none in the page table, and must read the same in the
    /// file.
    pub(crate) unsafe fn share(
        &self,
        at: &Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<Vec<usize>> {
        // SAFETY: the caller's promise.
        unsafe { sys::replace(at.start, at.end - at.start, file, offset, MapFlags::PRIVATE) }?;
        let mut entries = vec![0; (at.end - at.start) / PAGE_SIZE];
        // SAFETY: the call above mapped it.
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

    /// Makes the kernel hold writes to these pages, and reads their pagemap entries.
    ///
    /// # Safety
    /// The addresses must be of a private mapping of a file.
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
/// The addresses must be of a region, and the region's file must hold the same bytes as they read
/// now.
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

/// Copies the page at an address into the region's file.
///
/// # Safety
/// The page must be mapped, and writes to it held. If the kernel had no memory to hold writes, a
/// concurrent write is lost or torn.
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
