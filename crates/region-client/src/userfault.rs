//! userfaultfd: pages that the engine provides when a program touches them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aquifer_page::PAGE_SIZE;
use linux_raw_sys::general as raw;

use crate::sys;

/// The userfaultfd features that a region needs. Faults report missing pages and missing page table
/// entries; asynchronous write protection marks dirty pages without events (Linux 6.7). A fault
/// also names its thread.
const FEATURES: u64 = (raw::UFFD_FEATURE_MISSING_SHMEM
    | raw::UFFD_FEATURE_MINOR_SHMEM
    | raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_WP_UNPOPULATED
    | raw::UFFD_FEATURE_WP_ASYNC
    | raw::UFFD_FEATURE_POISON
    | raw::UFFD_FEATURE_THREAD_ID) as u64;

/// The features that guard shared pages: the kernel holds a write until the engine resolves its
/// fault.
const GUARD: u64 = (raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_THREAD_ID) as u64;

/// A userfaultfd. It stays tied to the memory of the process that made it, also in another process.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

/// A fault: a thread of the program waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The page's address in the program, aligned to a page.
    pub address: u64,
    /// The thread wants to write.
    pub write: bool,
    /// The page is in the file, and missing only in the page table.
    pub minor: bool,
    /// The id of the thread.
    pub thread: u32,
}

/// The result of filling a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// The page is there, and threads that waited for it continue.
    Now,
    /// A page was there already; threads that wait for it still wait.
    Before,
    /// The program or its mapping is gone.
    Gone,
}

impl Userfault {
    /// Makes a userfaultfd for a mapping of this process.
    ///
    /// # Errors
    /// The process lacks the right to serve faults of system calls (root, or
    /// `vm.unprivileged_userfaultfd=1`), or the kernel is older than Linux 6.7.
    pub fn new() -> io::Result<Self> {
        Self::with(FEATURES)
    }

    /// Makes a userfaultfd for shared pages, which reports only writes.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn guard() -> io::Result<Self> {
        Self::with(GUARD)
    }

    fn with(features: u64) -> io::Result<Self> {
        let this = Self(sys::userfaultfd()?);
        let mut api = sys::uffdio_api { api: u64::from(raw::UFFD_API), features, ioctls: 0 };
        // SAFETY: this only sets the features of the descriptor.
        unsafe { sys::userfault(this.as_fd(), &mut api) }?;
        Ok(this)
    }

    /// Registers a mapping of this process, so that all its faults come here.
    ///
    /// # Safety
    /// The range must be a shared mapping of a region's file, and the engine must provide its
    /// contents.
    pub unsafe fn register(&self, address: u64, length: u64) -> io::Result<()> {
        let mode = raw::UFFDIO_REGISTER_MODE_MISSING
            | raw::UFFDIO_REGISTER_MODE_MINOR
            | raw::UFFDIO_REGISTER_MODE_WP;
        let range = sys::uffdio_range { start: address, len: length };
        let mut register = sys::uffdio_register { range, mode: u64::from(mode), ioctls: 0 };
        // SAFETY: the caller wants pages to appear at the engine's command.
        unsafe { sys::userfault(self.as_fd(), &mut register) }
    }

    /// Makes the kernel hold writes to a mapping of this process and report them here. This
    /// includes writes to pages that are not in the page table yet.
    ///
    /// # Safety
    /// The range must be a private mapping of a file.
    pub unsafe fn protect(&self, address: u64, length: u64) -> io::Result<()> {
        let range = || sys::uffdio_range { start: address, len: length };
        let mode = u64::from(raw::UFFDIO_REGISTER_MODE_WP);
        let mut register = sys::uffdio_register { range: range(), mode, ioctls: 0 };
        // SAFETY: the caller wants writers to wait.
        unsafe { sys::userfault(self.as_fd(), &mut register) }?;
        let mut protect = sys::UffdioWriteprotect { range: range(), mode: sys::WRITEPROTECT };
        // SAFETY: as above.
        unsafe { sys::userfault(self.as_fd(), &mut protect) }
    }

    /// Returns the faults that wait, or some of them if they are many.
    pub fn faults(&self) -> io::Result<Vec<Fault>> {
        let messages = sys::events(self.as_fd())?;
        let fault = |message: &sys::uffd_msg| {
            let (address, flags, thread) = sys::page_fault(message)?;
            let is = |flag: u32| flags & u64::from(flag) != 0;
            Some(Fault {
                address: address & !(PAGE_SIZE as u64 - 1),
                write: is(raw::UFFD_PAGEFAULT_FLAG_WRITE),
                minor: is(raw::UFFD_PAGEFAULT_FLAG_MINOR),
                thread,
            })
        };
        Ok(messages.iter().filter_map(fault).collect())
    }

    /// Puts pages into the file and the page table, atomically for all readers. With `clean` the
    /// kernel marks the next write.
    pub fn fill(&self, address: u64, pages: &[u8], clean: bool) -> io::Result<Filled> {
        let mode = if clean { u64::from(raw::UFFDIO_COPY_MODE_WP) } else { 0 };
        let src = pages.as_ptr().expose_provenance() as u64;
        let mut copy =
            sys::uffdio_copy { dst: address, src, len: pages.len() as u64, mode, copy: 0 };
        // SAFETY: the source is borrowed. The mapping is registered to have pages appear.
        filled(unsafe { sys::userfault(self.as_fd(), &mut copy) })
    }

    /// Puts a page of zeroes there.
    pub fn fill_zero(&self, address: u64) -> io::Result<Filled> {
        let mut zero = sys::uffdio_zeropage { range: page(address), mode: 0, zeropage: 0 };
        // SAFETY: the mapping is registered to have pages appear.
        filled(unsafe { sys::userfault(self.as_fd(), &mut zero) })
    }

    /// Puts the page that is in the file back into the page table. With `clean` the kernel marks
    /// the next write.
    pub fn map(&self, address: u64, clean: bool) -> io::Result<Filled> {
        let mode = if clean { sys::CONTINUE_WP } else { 0 };
        let mut resume = sys::uffdio_continue { range: page(address), mode, mapped: 0 };
        // SAFETY: the mapping is registered to have pages appear.
        filled(unsafe { sys::userfault(self.as_fd(), &mut resume) })
    }

    /// Poisons a page that is not in the page table: each touch from then on raises `SIGBUS`.
    pub fn poison(&self, address: u64) -> io::Result<Filled> {
        // A page that left clean leaves a mark in its entry, and the kernel poisons only empty
        // entries. Without the mark the page counts as written to.
        let mode = sys::WRITEPROTECT_DONT_WAKE;
        let mut unmark = sys::UffdioWriteprotect { range: page(address), mode };
        // SAFETY: the kernel marks no more writes there, as for a page that appears for the first
        // time.
        let unmarked = unsafe { sys::userfault(self.as_fd(), &mut unmark) };
        unmarked.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) })?;
        let mut poison = sys::UffdioPoison { range: page(address), mode: 0, updated: 0 };
        // SAFETY: the registered mapping leaves the outcome of a touch to the engine.
        filled(unsafe { sys::userfault(self.as_fd(), &mut poison) })
    }

    /// Wakes all threads that wait for a page of this range, so that they fault again.
    pub fn wake(&self, address: u64, length: u64) -> io::Result<()> {
        let mut range = sys::uffdio_range { start: address, len: length };
        // SAFETY: a thread that is woken without cause faults and waits again.
        unsafe { sys::userfault(self.as_fd(), &mut range) }
    }
}

fn page(address: u64) -> sys::uffdio_range {
    sys::uffdio_range { start: address, len: PAGE_SIZE as u64 }
}

fn filled(result: io::Result<()>) -> io::Result<Filled> {
    let Err(error) = result else { return Ok(Filled::Now) };
    match error.raw_os_error() {
        Some(libc::EEXIST) => Ok(Filled::Before),
        _ if is_gone(&error) => Ok(Filled::Gone),
        _ => Err(error),
    }
}

/// Returns whether the program has ended, or its mapping at the address is gone.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
}

impl From<OwnedFd> for Userfault {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
