//! Mapped address space, and the system calls on it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use aquifer_page::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags};

/// A piece of address space, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the value, not to a thread; the owner of the value controls access
// to its bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared `Mapping` gives out addresses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` on, shared, without huge pages. In a huge page,
    /// a punched hole is zeroed but not freed.
    pub(super) fn of_file(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice cannot touch existing memory.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), length, access, flags, file, offset) }?;
        let mapping = Self::new(base, length)?;
        match mapping.advise(0, length, Advice::LinuxNoHugepage) {
            // Kernels without huge pages do not know the advice.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
            _ => Ok(mapping),
        }
    }

    /// Maps `length` bytes of zeroes that take no RAM until written.
    pub(super) fn zeroed(length: usize) -> io::Result<Self> {
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: as in `of_file`.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, access, flags) }?;
        Self::new(base, length)
    }

    fn new(base: *mut core::ffi::c_void, length: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, length })
    }

    /// Returns the address of the first byte.
    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the address of the byte at `offset`.
    ///
    /// # Panics
    /// If `offset + length` leaves the mapping.
    pub(super) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.length),
            "inside the mapping"
        );
        // SAFETY: the assertion above keeps it inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    fn advise(&self, offset: usize, length: usize, advice: Advice) -> io::Result<()> {
        let start = self.at(offset, length).cast();
        // SAFETY: `start` and `length` are inside our own mapping, and no advice used here changes
        // its contents.
        Ok(unsafe { rustix::mm::madvise(start, length, advice) }?)
    }

    /// Allocates and maps `pages`; new ones are zero.
    ///
    /// On a full tmpfs, where a plain write would get SIGBUS, `MADV_POPULATE_WRITE` fails with
    /// `EFAULT`; this function returns `ENOSPC` instead.
    pub(super) fn populate_write(&self, pages: &Range<usize>) -> io::Result<()> {
        let result = self.advise(
            pages.start * PAGE_SIZE,
            pages.len() * PAGE_SIZE,
            Advice::LinuxPopulateWrite,
        );
        result.map_err(|error| match error.raw_os_error() {
            Some(libc::EFAULT) => io::Error::from_raw_os_error(libc::ENOSPC),
            _ => error,
        })
    }

    /// Maps `pages`, which exist, so that the kernel locks them in RAM.
    pub(super) fn populate_read(&self, pages: &Range<usize>) -> io::Result<()> {
        self.advise(pages.start * PAGE_SIZE, pages.len() * PAGE_SIZE, Advice::LinuxPopulateRead)
    }

    /// Keeps pages from being swapped out: the kernel locks each page when it is mapped.
    pub(super) fn lock_in_ram(&self) -> io::Result<()> {
        // SAFETY: our own mapping; locking does not change its contents.
        Ok(unsafe {
            rustix::mm::mlock_with(self.base.as_ptr().cast(), self.length, MlockFlags::ONFAULT)
        }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Frees the RAM of a file's pages; they then read as zeroes.
pub(super) fn punch(file: &File, pages: &Range<usize>) -> io::Result<()> {
    let (offset, length) = ((pages.start * PAGE_SIZE) as u64, (pages.len() * PAGE_SIZE) as u64);
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        match rustix::fs::fallocate(file, flags, offset, length) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Returns the allocated runs of a file of `pages` pages, in ascending order. For recovery: no
/// other thread uses the file.
pub(super) fn stored_runs(file: &File, pages: usize) -> io::Result<Vec<Range<usize>>> {
    let end = (pages * PAGE_SIZE) as u64;
    let mut runs = Vec::new();
    let mut at = 0;
    while at < end
        && let Some(start) = seek(file, SeekFrom::Data(at))?
    {
        at = seek(file, SeekFrom::Hole(start))?.unwrap_or(end).min(end);
        runs.push(start as usize / PAGE_SIZE..(at as usize).div_ceil(PAGE_SIZE));
    }
    Ok(runs)
}

fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(at) => Ok(Some(at)),
        // No data after this offset.
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
