use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_page::{Bytes, Group, HostName, LeaseId, PAGE_SIZE, is_zero};

use crate::dir::{Dir, Kind};
use crate::span::{CHUNK_PAGES, Span, runs};
use crate::sys::{Frames, ReadRun, WriteRun};
use crate::{LeaseRecord, StoreError};

/// A sparse piece of a lender's RAM, promised to one borrower.
///
/// Any byte range inside the capacity can be read and written from any number of threads; each page is changed as a
/// whole, a longer request page by page. Who works on different pages never waits for the other.
#[derive(Debug)]
pub struct Lease {
    record: Mutex<LeaseRecord>,
    id: LeaseId,
    borrower: HostName,
    group: Group,
    capacity: u64,
    quota_pages: u64,
    stored_pages: AtomicU64,
    retired: AtomicBool,
    frames: Frames,
    dir: Arc<Dir>,
}

/// A run of a lease that is all stored or all hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Bytes in the run.
    pub length: u64,
    /// Whether it takes RAM; if not, it reads as zeroes.
    pub stored: bool,
}

/// A piece of held bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Bytes, straight from the store's memory.
    Data(&'a [u8]),
    /// So many bytes that are not stored and read as zeroes.
    Hole(usize),
}

/// Bytes of a lease that nobody changes as long as this lives, to be sent from where they are.
#[derive(Debug)]
pub struct Held<'a> {
    run: ReadRun<'a>,
    span: Span,
}

impl Lease {
    /// Wraps `frames`, in which `stored` pages are stored.
    pub(crate) fn new(record: LeaseRecord, frames: Frames, stored: usize, dir: Arc<Dir>) -> Self {
        Self {
            id: record.id,
            borrower: record.borrower.clone(),
            group: record.group.clone(),
            capacity: record.capacity.0,
            quota_pages: record.quota.0 / PAGE_SIZE as u64,
            stored_pages: AtomicU64::new(stored as u64),
            retired: AtomicBool::new(false),
            record: Mutex::new(record),
            frames,
            dir,
        }
    }

    /// The lease's id.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Who may use it.
    pub fn borrower(&self) -> &HostName {
        &self.borrower
    }

    /// The tenant it is accounted to.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Its size as an address space.
    pub fn capacity(&self) -> Bytes {
        Bytes(self.capacity)
    }

    /// The most it may store, rounded down to whole pages.
    pub fn quota(&self) -> Bytes {
        Bytes(self.quota_pages * PAGE_SIZE as u64)
    }

    /// What it stores now.
    pub fn stored(&self) -> Bytes {
        Bytes(self.stored_pages.load(Ordering::Relaxed) * PAGE_SIZE as u64)
    }

    /// The whole record, with the note as it is now.
    pub fn record(&self) -> LeaseRecord {
        self.locked_record().clone()
    }

    /// Replaces the note, on the tmpfs too.
    ///
    /// # Errors
    /// [`StoreError::File`]; the old note stays. [`StoreError::Gone`] once the lease was removed.
    pub fn set_note(&self, note: serde_json::Value) -> Result<(), StoreError> {
        let mut record = self.locked_record();
        self.check_alive()?;
        let changed = LeaseRecord { note, ..record.clone() };
        changed.save(&self.dir.file(self.id, Kind::Record))?;
        *record = changed;
        Ok(())
    }

    /// Fills `buf` from `offset` on. Allocates nothing, neither here nor in the lease.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), StoreError> {
        let span = self.span(offset, buf.len() as u64)?;
        for chunk in span.chunks() {
            let run = self.frames.read(chunk);
            self.check_alive()?;
            for (pages, stored) in run.runs() {
                let target = &mut buf[span.of_span(&pages)];
                if stored {
                    target.copy_from_slice(&run.bytes(&pages)[span.of_pages(&pages)]);
                } else {
                    target.fill(0);
                }
            }
        }
        Ok(())
    }

    /// Stores `data` at `offset`. Pages that are all zero afterwards take no RAM.
    ///
    /// # Errors
    /// [`StoreError::Full`] and [`StoreError::NoMemory`], with any part of the range written;
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let span = self.span(offset, data.len() as u64)?;
        for chunk in span.chunks() {
            let mut run = self.frames.write(chunk.clone());
            self.check_alive()?;
            let zero = |page: usize| is_zero(&data[span.of_span(&(page..page + 1))]);
            for (pages, zero) in runs(chunk, zero) {
                if zero {
                    self.clear(&mut run, &span, pages)?;
                } else {
                    self.provide(&mut run, &pages)?;
                    run.bytes(&pages)[span.of_pages(&pages)].copy_from_slice(&data[span.of_span(&pages)]);
                }
            }
        }
        Ok(())
    }

    /// Makes the range read as zeroes and gives its RAM back; pages only partly in the range give it back if the rest
    /// of them is zero too.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`], [`StoreError::NoMemory`] if the kernel cannot.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), StoreError> {
        let span = self.span(offset, length)?;
        self.check_alive()?;
        self.clear_all(&span)
    }

    /// Makes the range read as zeroes and takes RAM for all of it, so that later writes to it cannot find the lease full.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn allocate_zeroes(&self, offset: u64, length: u64) -> Result<(), StoreError> {
        let span = self.span(offset, length)?;
        for chunk in span.chunks() {
            let mut run = self.frames.write(chunk.clone());
            self.check_alive()?;
            self.provide(&mut run, &chunk)?;
            run.bytes(&chunk)[span.of_pages(&chunk)].fill(0);
        }
        Ok(())
    }

    /// The runs of stored and not stored bytes in the range, as they are just now.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn block_status(&self, offset: u64, length: u64) -> Result<impl Iterator<Item = Run>, StoreError> {
        let span = self.span(offset, length)?;
        self.check_alive()?;
        let runs = self.frames.peek_runs(span.pages());
        Ok(runs.map(move |(pages, stored)| Run { length: span.of_span(&pages).len() as u64, stored }))
    }

    /// Says why a request for the range would fail, without doing anything.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn check(&self, offset: u64, length: u64) -> Result<(), StoreError> {
        self.span(offset, length)?;
        self.check_alive()
    }

    /// Holds the range for reading, waiting for writers.
    ///
    /// Who holds something already MUST use [`try_hold`](Self::try_hold): two threads could otherwise wait for each
    /// other. For the same reason nobody may write while holding.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn hold(&self, offset: u64, length: u64) -> Result<Held<'_>, StoreError> {
        let span = self.span(offset, length)?;
        let run = self.frames.read(span.pages());
        self.check_alive()?;
        Ok(Held { run, span })
    }

    /// Holds the range for reading, or says `None` where that would need waiting.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn try_hold(&self, offset: u64, length: u64) -> Result<Option<Held<'_>>, StoreError> {
        let span = self.span(offset, length)?;
        let run = self.frames.try_read(span.pages());
        self.check_alive()?;
        Ok(run.map(|run| Held { run, span }))
    }

    /// Ends the lease: whatever comes after fails with [`StoreError::Gone`], and all RAM is given back at once, even if
    /// connections still have the lease. Its files go too, the record first: a crash on the way leaves pages without a
    /// record, which the next open sweeps away.
    ///
    /// Nothing can be stored behind the sweep's back: a writer looks at `retired` after it took its page, the sweep at
    /// the page after it set `retired`, and all four are sequentially consistent. So a writer that the sweep did not see
    /// sees the flag.
    pub(crate) fn retire(&self) -> Result<(), StoreError> {
        {
            let _no_new_record = self.locked_record();
            self.retired.store(true, Ordering::SeqCst);
            self.dir.delete(self.id, Kind::Record)?;
        }
        self.clear_all(&Span::new(0, self.capacity))?;
        self.dir.delete(self.id, Kind::Pages)
    }

    fn clear_all(&self, span: &Span) -> Result<(), StoreError> {
        let mut rest = span.pages();
        while let Some(start) = self.frames.first_not_idle(rest.clone()) {
            let chunk = start..rest.end.min(start + CHUNK_PAGES);
            let mut run = self.frames.write(chunk.clone());
            rest.start = chunk.end;
            self.clear(&mut run, span, chunk)?;
        }
        Ok(())
    }

    /// Zeroes the part of `pages` that is in `span` and gives back those that are all zero then.
    fn clear(&self, run: &mut WriteRun<'_>, span: &Span, mut pages: Range<usize>) -> Result<(), StoreError> {
        // Only the two pages at the ends can be in the span in part.
        if self.stays_after_clearing(run, span, pages.start) {
            pages.start += 1;
        }
        if !pages.is_empty() && self.stays_after_clearing(run, span, pages.end - 1) {
            pages.end -= 1;
        }
        let mut at = pages.start;
        while let Some(stored) = run.next_run(at..pages.end, true) {
            run.punch(&stored).map_err(|source| StoreError::NoMemory { lease: self.id, source })?;
            self.stored_pages.fetch_sub(stored.len() as u64, Ordering::Relaxed);
            at = stored.end;
        }
        Ok(())
    }

    /// If `span` cuts this stored page: zeroes the part and says whether anything is left in the rest.
    fn stays_after_clearing(&self, run: &mut WriteRun<'_>, span: &Span, page: usize) -> bool {
        if !span.cuts(page) || !run.stored(page) {
            return false;
        }
        let pages = page..page + 1;
        let bytes = run.bytes(&pages);
        bytes[span.of_pages(&pages)].fill(0);
        !is_zero(bytes)
    }

    /// Sees to it that all of `pages` are stored.
    fn provide(&self, run: &mut WriteRun<'_>, pages: &Range<usize>) -> Result<(), StoreError> {
        let mut at = pages.start;
        while let Some(missing) = run.next_run(at..pages.end, false) {
            self.reserve(missing.len() as u64)?;
            if let Err(source) = run.populate(&missing) {
                self.stored_pages.fetch_sub(missing.len() as u64, Ordering::Relaxed);
                return Err(StoreError::NoMemory { lease: self.id, source: explain_populate(source) });
            }
            at = missing.end;
        }
        Ok(())
    }

    /// Accounts for `pages` more, if the quota has room for them.
    fn reserve(&self, pages: u64) -> Result<(), StoreError> {
        let fits = |stored: u64| Some(stored + pages).filter(|&after| after <= self.quota_pages);
        match self.stored_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(()),
            Err(_) => Err(StoreError::Full { lease: self.id, quota: self.quota() }),
        }
    }

    fn span(&self, offset: u64, length: u64) -> Result<Span, StoreError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.capacity) {
            Ok(Span::new(offset, length))
        } else {
            Err(StoreError::Range { lease: self.id, offset, length, capacity: self.capacity() })
        }
    }

    fn check_alive(&self) -> Result<(), StoreError> {
        if self.retired.load(Ordering::SeqCst) { Err(StoreError::Gone(self.id)) } else { Ok(()) }
    }

    fn locked_record(&self) -> MutexGuard<'_, LeaseRecord> {
        // A record is replaced in one assignment, so a panic elsewhere cannot have left half of one.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held<'_> {
    /// The bytes in order, in as few pieces as possible.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        self.run.runs().map(|(pages, stored)| {
            if stored {
                Segment::Data(&self.run.bytes(&pages)[self.span.of_pages(&pages)])
            } else {
                Segment::Hole(self.span.of_span(&pages).len())
            }
        })
    }
}

/// `MADV_POPULATE_WRITE` says `EFAULT` where a plain write would be killed by SIGBUS: the tmpfs is full.
fn explain_populate(error: io::Error) -> io::Error {
    if error.raw_os_error() == Some(libc::EFAULT) {
        io::Error::from_raw_os_error(libc::ENOSPC)
    } else {
        error
    }
}
