//! A disk, read and written through the cache.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_nbd::server::{self, Zeroes};
use aquifer_page::{Bytes, PAGE_SIZE, lock};

use super::file::{DiskFile, MOST, with_buffer};
use super::pages::{Key, Pages};

const PAGE: u64 = PAGE_SIZE as u64;

/// Size in bytes of a part, whose pages are locked together. So a page read from the file is in the
/// cache before a writer changes it.
pub(super) const PART: u64 = MOST as u64;

/// Number of locks; the parts of a disk share them.
const LOCKS: u64 = 64;

/// Bytes read and written so far.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) read: AtomicU64,
    pub(super) written: AtomicU64,
}

/// How long the first write to the disk of an arriving VM waits for the host that it came from.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between two attempts to lock a disk.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Returns whether a later attempt to lock a disk may succeed.
fn may_pass(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, ResourceBusy, WouldBlock};
    matches!(error.kind(), ResourceBusy | WouldBlock | Interrupted)
}

/// A disk that is served.
///
/// A cached page equals the file's, except while a writer holds the lock of its part. So a cached
/// page can be read without the lock. No page of a disk that is not held is cached.
#[derive(Debug)]
pub(super) struct Disk {
    number: u32,
    file: DiskFile,
    read_only: bool,
    /// Whether the file is locked. It changes only under the lock of a part: to true under one of
    /// them, and to false under all.
    held: AtomicBool,
    /// Excludes others that lock the file.
    taking: Mutex<()>,
    pages: Arc<Pages>,
    traffic: Arc<Traffic>,
    parts: [RwLock<()>; LOCKS as usize],
}

impl Disk {
    /// Makes a disk. `number` must not have been used for another one. Unless it is `held`, its
    /// first write locks the file.
    pub(super) fn new(
        number: u32,
        file: DiskFile,
        (read_only, held): (bool, bool),
        pages: Arc<Pages>,
        traffic: Arc<Traffic>,
    ) -> Self {
        let parts = [const { RwLock::new(()) }; LOCKS as usize];
        let (held, taking) = (AtomicBool::new(held), Mutex::new(()));
        Self { number, file, read_only, held, taking, pages, traffic, parts }
    }

    /// Returns whether this cache has locked the file.
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Locks the file for a writer that holds the lock of a part. The host that the VM came from
    /// unlocks it.
    fn take(&self) -> io::Result<()> {
        if self.is_held() {
            return Ok(());
        }
        // Writers that wait for each other wait no longer than one.
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let _taking = lock(&self.taking);
        while !self.is_held() {
            match self.file.lock() {
                Ok(()) => self.held.store(true, Ordering::Release),
                Err(error) if may_pass(&error) && Instant::now() < deadline => {
                    thread::sleep(RETRY_INTERVAL);
                }
                Err(error) => {
                    tracing::error!("a VM cannot write to its disk: {error}");
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Unlocks the file and drops all pages: the VM has moved to another host. A later write locks
    /// the file again.
    pub(super) fn release(&self) -> io::Result<()> {
        let _locked = self.all_for_writing(0, u64::MAX);
        self.held.store(false, Ordering::Release);
        self.forget();
        self.file.unlock()
    }

    fn key(&self, page: u64) -> Key {
        Key { lent: false, disk: self.number, page }
    }

    fn lock(&self, at: u64) -> &RwLock<()> {
        &self.parts[(at / PART % LOCKS) as usize]
    }

    fn for_reading(&self, at: u64) -> RwLockReadGuard<'_, ()> {
        self.lock(at).read().unwrap_or_else(PoisonError::into_inner)
    }

    fn for_writing(&self, at: u64) -> RwLockWriteGuard<'_, ()> {
        self.lock(at).write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks all parts in a range of any length. Locks are taken in ascending order, against
    /// deadlocks.
    fn all_for_writing(&self, start: u64, end: u64) -> Vec<RwLockWriteGuard<'_, ()>> {
        let parts = start / PART..end.div_ceil(PART);
        let all = parts.end - parts.start >= LOCKS;
        let is_meant = |lock: &u64| all || parts.clone().any(|part| part % LOCKS == *lock);
        (0..LOCKS).filter(is_meant).map(|lock| self.for_writing(lock * PART)).collect()
    }

    /// Reads cached pages of a part, and the others from the file.
    fn read_part(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let mut missing = None;
        let end = at + into.len() as u64;
        for page in at / PAGE..=end / PAGE {
            let (from, to) = (at.max(page * PAGE), end.min((page + 1) * PAGE));
            let wanted = from < to;
            let there = wanted && {
                let into = &mut into[(from - at) as usize..(to - at) as usize];
                self.pages.read(self.key(page), (from % PAGE) as usize, into)
            };
            if wanted && !there {
                missing = missing.or(Some(from));
            } else if let Some(first) = missing.take() {
                let until = from.min(end);
                self.fetch(first, &mut into[(first - at) as usize..(until - at) as usize])?;
            }
        }
        missing.map_or(Ok(()), |first| self.fetch(first, &mut into[(first - at) as usize..]))
    }

    /// Reads pages from a lender that has all of them, or else from the file, and caches them.
    fn fetch(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let whole = around(at, into.len());
        let _locked = self.for_reading(at);
        with_buffer(((whole.1 - whole.0) / PAGE) as usize, |buffer| {
            // Read once: a write to another part may lock the file meanwhile.
            let held = self.is_held();
            if !held || !self.pages.read_remote(self.key(whole.0 / PAGE), buffer) {
                self.file.read(whole.0, buffer)?;
            }
            for (page, data) in (whole.0 / PAGE..).zip(buffer.chunks_exact(PAGE_SIZE)) {
                if held {
                    self.pages.put(self.key(page), data);
                }
            }
            into.copy_from_slice(&buffer[(at - whole.0) as usize..][..into.len()]);
            Ok(())
        })
    }

    fn write_part(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let whole = around(at, from.len());
        let _locked = self.for_writing(at);
        self.take()?;
        self.write_locked(whole, at, from)
    }

    /// Writes within a part that the caller has locked.
    fn write_locked(&self, (start, end): (u64, u64), at: u64, from: &[u8]) -> io::Result<()> {
        let written = with_buffer(((end - start) / PAGE) as usize, |buffer| {
            let last = end - PAGE;
            if at > start {
                self.load(start, &mut buffer[..PAGE_SIZE])?;
            }
            if at + (from.len() as u64) < end && (last > start || at == start) {
                self.load(last, &mut buffer[(last - start) as usize..])?;
            }
            buffer[(at - start) as usize..][..from.len()].copy_from_slice(from);
            self.file.write(start, buffer)?;
            for (page, data) in (start / PAGE..).zip(buffer.chunks_exact(PAGE_SIZE)) {
                self.pages.change(self.key(page), data);
            }
            Ok(())
        });
        // The content after a failed write is unknown.
        written.inspect_err(|_| self.pages.forget(self.key(start / PAGE), (end - start) / PAGE))
    }

    /// Reads a page that is about to be partly overwritten.
    fn load(&self, at: u64, page: &mut [u8]) -> io::Result<()> {
        if self.pages.read(self.key(at / PAGE), 0, page) {
            Ok(())
        } else {
            self.file.read(at, page)
        }
    }

    /// Zeroes whole pages without writing them, if the file system can.
    fn zero(&self, start: u64, end: u64, hole: bool) -> io::Result<()> {
        let _locked = self.all_for_writing(start, end);
        self.take()?;
        let zeroed = self.file.zero(start, end - start, hole);
        self.pages.forget(self.key(start / PAGE), (end - start) / PAGE);
        zeroed
    }

    fn write_zeroes_by_writing(&self, offset: u64, length: u64) -> io::Result<()> {
        let zeroes = vec![0; MOST.min(length as usize)];
        for (at, length) in parts(offset, length) {
            self.write_part(at, &zeroes[..length])?;
        }
        Ok(())
    }

    /// Drops all pages of the disk from the cache.
    fn forget(&self) {
        self.pages.forget(self.key(0), u64::MAX);
    }

    /// Drops all pages of the disk from the cache, and releases the file's locks. The disk must not
    /// be used afterwards.
    pub(super) fn close(&self) {
        self.forget();
        // Closing the file releases the locks at the latest.
        let _ = self.file.unlock();
    }
}

impl server::Disk for Disk {
    fn size(&self) -> Bytes {
        self.file.size()
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.traffic.read.fetch_add(into.len() as u64, Ordering::Relaxed);
        for (at, length) in parts(offset, into.len() as u64) {
            self.read_part(at, &mut into[(at - offset) as usize..][..length])?;
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.traffic.written.fetch_add(from.len() as u64, Ordering::Relaxed);
        for (at, length) in parts(offset, from.len() as u64) {
            self.write_part(at, &from[(at - offset) as usize..][..length])?;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        // After a failed flush the file may hold other data than the cache.
        self.file.flush().inspect_err(|_| self.forget())
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        let (start, end) = inside(offset, length);
        if start >= end {
            return Ok(());
        }
        match self.zero(start, end, true) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            done => done,
        }
    }

    fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> io::Result<()> {
        let (start, end) = inside(offset, length);
        if start >= end {
            return if how.fast {
                Err(io::ErrorKind::Unsupported.into())
            } else {
                self.write_zeroes_by_writing(offset, length)
            };
        }
        match self.zero(start, end, how.hole) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported && !how.fast => {
                return self.write_zeroes_by_writing(offset, length);
            }
            done => done?,
        }
        self.write_zeroes_by_writing(offset, start - offset)?;
        self.write_zeroes_by_writing(end, offset + length - end)
    }
}

/// Returns the range of whole pages that contains this range.
fn around(at: u64, length: usize) -> (u64, u64) {
    (at / PAGE * PAGE, (at + length as u64).next_multiple_of(PAGE))
}

/// Returns the whole pages within a range.
fn inside(offset: u64, length: u64) -> (u64, u64) {
    (offset.next_multiple_of(PAGE), (offset + length) / PAGE * PAGE)
}

/// Splits a range at the borders of parts.
fn parts(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        let next = end.min((at / PART + 1) * PART);
        let part = (at < next).then(|| (at, (next - at) as usize));
        at = next;
        part
    })
}
