//! userfaultfd: pages that appear when somebody asks for them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aquifer_page::PAGE_SIZE;
use linux_raw_sys::general as raw;

use crate::sys;

/// What a region needs of the kernel: faults on pages that are not in the file or not in the page table, dirty pages told without an
/// event each (Linux 6.7), and which thread waits.
const FEATURES: u64 = (raw::UFFD_FEATURE_MISSING_SHMEM
    | raw::UFFD_FEATURE_MINOR_SHMEM
    | raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_WP_UNPOPULATED
    | raw::UFFD_FEATURE_WP_ASYNC
    | raw::UFFD_FEATURE_POISON
    | raw::UFFD_FEATURE_THREAD_ID) as u64;

/// What guards pages that are shared: a write to one is held until it is told that it may be.
const GUARD: u64 = (raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_THREAD_ID) as u64;

/// A userfaultfd: of the program that made it, whoever holds it.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

/// A thread of the program waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The page's address in the program.
    pub address: u64,
    /// It wants to write.
    pub write: bool,
    /// The page is in the file, and only missing in the page table.
    pub minor: bool,
    /// The thread.
    pub thread: u32,
}

/// What came of filling a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// The page is there now, and whoever waited for it goes on.
    Now,
    /// There was a page already; whoever waits for it still waits.
    Before,
    /// The program, or its mapping, is gone.
    Gone,
}

impl Userfault {
    /// A new one for this process.
    ///
    /// # Errors
    /// Without the right to serve faults in system calls (root, or `vm.unprivileged_userfaultfd`), and on kernels before 6.7.
    pub fn new() -> io::Result<Self> {
        Self::with(FEATURES)
    }

    /// A new one for pages that are shared with others: what is told by it are writes.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn guard() -> io::Result<Self> {
        Self::with(GUARD)
    }

    fn with(features: u64) -> io::Result<Self> {
        let this = Self(sys::userfaultfd()?);
        let mut api = sys::uffdio_api { api: u64::from(raw::UFFD_API), features, ioctls: 0 };
        // SAFETY: this only settles what the descriptor can do.
        unsafe { sys::userfault(this.as_fd(), &mut api) }?;
        Ok(this)
    }

    /// Has all faults in a mapping of this process come here.
    ///
    /// # Safety
    /// It must be a shared mapping of a region's file, whose contents are the engine's to give.
    pub unsafe fn register(&self, address: u64, length: u64) -> io::Result<()> {
        let mode = raw::UFFDIO_REGISTER_MODE_MISSING
            | raw::UFFDIO_REGISTER_MODE_MINOR
            | raw::UFFDIO_REGISTER_MODE_WP;
        let range = sys::uffdio_range { start: address, len: length };
        let mut register = sys::uffdio_register { range, mode: u64::from(mode), ioctls: 0 };
        // SAFETY: that the pages appear when the engine says is what the caller wants.
        unsafe { sys::userfault(self.as_fd(), &mut register) }
    }

    /// Has writes to a mapping of this process be held, and come here, also those to pages that are not in the page table yet.
    ///
    /// # Safety
    /// It must be a private mapping of a file.
    pub unsafe fn protect(&self, address: u64, length: u64) -> io::Result<()> {
        let range = || sys::uffdio_range { start: address, len: length };
        let mode = u64::from(raw::UFFDIO_REGISTER_MODE_WP);
        let mut register = sys::uffdio_register { range: range(), mode, ioctls: 0 };
        // SAFETY: that writers wait is what the caller wants.
        unsafe { sys::userfault(self.as_fd(), &mut register) }?;
        let mut protect = sys::UffdioWriteprotect { range: range(), mode: sys::WRITEPROTECT };
        // SAFETY: as above.
        unsafe { sys::userfault(self.as_fd(), &mut protect) }
    }

    /// The next fault, if there is one.
    pub fn next(&self) -> io::Result<Option<Fault>> {
        while let Some(message) = sys::event(self.as_fd())? {
            if let Some((address, flags, thread)) = sys::page_fault(&message) {
                let is = |flag: u32| flags & u64::from(flag) != 0;
                return Ok(Some(Fault {
                    address: address & !(PAGE_SIZE as u64 - 1),
                    write: is(raw::UFFD_PAGEFAULT_FLAG_WRITE),
                    minor: is(raw::UFFD_PAGEFAULT_FLAG_MINOR),
                    thread,
                }));
            }
        }
        Ok(None)
    }

    /// Puts these pages into the file and the page table, at once as far as anybody can see. `clean` has the next write be noticed.
    pub fn fill(&self, address: u64, pages: &[u8], clean: bool) -> io::Result<Filled> {
        let mode = if clean { u64::from(raw::UFFDIO_COPY_MODE_WP) } else { 0 };
        let src = pages.as_ptr().expose_provenance() as u64;
        let mut copy =
            sys::uffdio_copy { dst: address, src, len: pages.len() as u64, mode, copy: 0 };
        // SAFETY: the source is borrowed; the mapping was registered to have pages appear.
        filled(unsafe { sys::userfault(self.as_fd(), &mut copy) })
    }

    /// Puts a page of zeroes there.
    pub fn fill_zero(&self, address: u64) -> io::Result<Filled> {
        let mut zero = sys::uffdio_zeropage { range: page(address), mode: 0, zeropage: 0 };
        // SAFETY: the mapping was registered to have pages appear.
        filled(unsafe { sys::userfault(self.as_fd(), &mut zero) })
    }

    /// Puts the page that is in the file back into the page table.
    pub fn map(&self, address: u64, clean: bool) -> io::Result<Filled> {
        let mode = if clean { sys::CONTINUE_WP } else { 0 };
        let mut resume = sys::uffdio_continue { range: page(address), mode, mapped: 0 };
        // SAFETY: the mapping was registered to have pages appear.
        filled(unsafe { sys::userfault(self.as_fd(), &mut resume) })
    }

    /// Has whoever touches this page, which is not in the page table, get `SIGBUS` from now on.
    pub fn poison(&self, address: u64) -> io::Result<Filled> {
        // A page that left clean has left a mark, and the kernel poisons only what is empty. Without the mark it counts as written to.
        let mode = sys::WRITEPROTECT_DONT_WAKE;
        let mut unmark = sys::UffdioWriteprotect { range: page(address), mode };
        // SAFETY: writes are not noticed any more, as to a page that is there for the first time.
        let unmarked = unsafe { sys::userfault(self.as_fd(), &mut unmark) };
        unmarked.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) })?;
        let mut poison = sys::UffdioPoison { range: page(address), mode: 0, updated: 0 };
        // SAFETY: whoever registered the mapping leaves it to the engine what comes of a touch.
        filled(unsafe { sys::userfault(self.as_fd(), &mut poison) })
    }

    /// Has whoever waits for a page of this range try again.
    pub fn wake(&self, address: u64, length: u64) -> io::Result<()> {
        let mut range = sys::uffdio_range { start: address, len: length };
        // SAFETY: who is woken without reason waits again.
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

/// The program has ended, or there is no mapping there any more.
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
