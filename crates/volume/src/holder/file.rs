//! The spill file: a sparse local file.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

use aquifer_page::{Bytes, PAGE_SIZE, WorkerId};
use aquifer_transport::sleep::going_to_sleep;
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Holder, HolderError, write_zeroes};
use crate::lock_any;

/// Pages that pass through a worker's bounce buffer at a time.
const BOUNCE: usize = 32;

/// Memory aligned for direct I/O.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub(super) struct Page(pub(super) [u8; PAGE_SIZE]);

/// A local file that holds extents.
///
/// The file bypasses the page cache where the file system can. Otherwise pages that were swapped
/// out to free memory would fill it again.
pub struct FileHolder {
    file: File,
    direct: Option<Direct>,
}

/// The same file opened for direct I/O, and an aligned buffer for each worker.
struct Direct {
    file: File,
    bounce: Box<[Mutex<Box<[Page]>>]>,
}

impl fmt::Debug for FileHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileHolder").field("direct", &self.direct.is_some()).finish_non_exhaustive()
    }
}

impl FileHolder {
    /// Makes an empty sparse file of `size` in `dir`. It has no name, so the kernel removes it once
    /// the process ends.
    ///
    /// # Errors
    /// The system's, for example if the file system has no `O_TMPFILE`.
    pub fn create(dir: &Path, size: Bytes, workers: usize) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Self::of(rustix::fs::openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR)?, size, workers)
    }

    /// Opens the sparse file `path`, with the pages that an earlier process stored in it.
    ///
    /// # Errors
    /// The system's. [`Errno::LOOP`] if the path is a symbolic link.
    pub fn open(path: &Path, size: Bytes, workers: usize) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Self::of(rustix::fs::openat(CWD, path, flags, Mode::empty())?, size, workers)
    }

    fn of(file: OwnedFd, size: Bytes, workers: usize) -> io::Result<Self> {
        let file = File::from(file);
        file.set_len(size.0)?;
        let direct = open_direct(&file).map(|file| Direct {
            file,
            bounce: (0..workers.max(1))
                .map(|_| Mutex::new(vec![Page([0; PAGE_SIZE]); BOUNCE].into()))
                .collect(),
        });
        Ok(Self { file, direct })
    }

    /// Returns the direct side for ranges that direct I/O accepts: whole pages.
    fn direct(&self, offset: u64, length: usize) -> Option<&Direct> {
        let aligned = offset.is_multiple_of(PAGE_SIZE as u64) && length.is_multiple_of(PAGE_SIZE);
        self.direct.as_ref().filter(|_| aligned)
    }
}

/// Opens the file again with `O_DIRECT`; `None` where the file system refuses that (tmpfs before
/// Linux 6.6).
fn open_direct(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
    let direct = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let mut probe = [Page([0; PAGE_SIZE])];
    direct.read_at(probe.as_mut_bytes(), 0).ok().map(|_| direct)
}

impl Direct {
    fn bounced<E>(
        &self,
        worker: WorkerId,
        mut step: impl FnMut(&mut [u8]) -> Result<bool, E>,
    ) -> Result<(), E> {
        let mut pages = lock_any(&self.bounce, worker);
        while step(pages.as_mut_bytes())? {}
        Ok(())
    }

    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut chunks = into.chunks_mut(BOUNCE * PAGE_SIZE);
        let mut at = offset;
        self.bounced(worker, |pages| {
            let Some(chunk) = chunks.next() else { return Ok(false) };
            self.file.read_exact_at(&mut pages[..chunk.len()], at)?;
            chunk.copy_from_slice(&pages[..chunk.len()]);
            at += chunk.len() as u64;
            Ok(true)
        })
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.as_ptr().addr().is_multiple_of(align_of::<Page>()) {
            return self.file.write_all_at(data, offset);
        }
        let mut chunks = data.chunks(BOUNCE * PAGE_SIZE);
        let mut at = offset;
        self.bounced(worker, |pages| {
            let Some(chunk) = chunks.next() else { return Ok(false) };
            pages[..chunk.len()].copy_from_slice(chunk);
            self.file.write_all_at(&pages[..chunk.len()], at)?;
            at += chunk.len() as u64;
            Ok(true)
        })
    }
}

impl Holder for FileHolder {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        going_to_sleep();
        match self.direct(offset, into.len()) {
            Some(direct) => direct.read(worker, offset, into),
            None => self.file.read_exact_at(into, offset),
        }
        .map_err(meaning)
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        going_to_sleep();
        match self.direct(offset, data.len()) {
            Some(direct) => direct.write(worker, offset, data),
            None => self.file.write_all_at(data, offset),
        }
        .map_err(meaning)
    }

    fn discard(&self, _worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, offset, length) {
            Err(Errno::OPNOTSUPP) => {
                write_zeroes(offset, length, |at, zeroes| self.file.write_all_at(zeroes, at))
            }
            result => result.map_err(io::Error::from),
        }
        .map_err(meaning)
    }

    /// Does nothing: the volume does not outlive the host.
    fn flush(&self, _worker: WorkerId) -> Result<(), HolderError> {
        Ok(())
    }
}

fn meaning(error: io::Error) -> HolderError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            HolderError::Full(Box::new(error))
        }
        _ => HolderError::Failed(Box::new(error)),
    }
}
