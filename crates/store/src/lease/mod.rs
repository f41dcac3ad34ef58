//! A lease: reads, writes and discards of byte ranges, and the lease's record and end.

mod account;
mod export;
mod pages;
mod private_pages;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use aquifer_page::export::{ExportError, Run, Segment};
use aquifer_page::visitor::{Denied, End, Visitor};
use aquifer_page::{Bytes, Group, HostName, Incarnation, LeaseId, lock};

pub(crate) use self::account::Account;
pub(crate) use self::pages::Pages;
use self::pages::ReadRun;
use crate::dir::{Dir, Entry};
use crate::span::{CHUNK_PAGES, Span};
use crate::tenancy::{Tenancy, TenancyRecord};
use crate::{LeaseRecord, Stay, StoreError};

/// A sparse piece of a lender's RAM, promised to one borrower.
///
/// Threads can read and write any byte ranges inside the capacity in parallel. Each page changes
/// atomically, a longer request page by page. Threads that work on different pages do not wait for
/// each other.
#[derive(Debug)]
pub struct Lease {
    record: Mutex<LeaseRecord>,
    id: LeaseId,
    group: Group,
    capacity: u64,
    account: Account,
    retired: AtomicBool,
    pages: Pages,
    dir: Arc<Dir>,
    tenancy: Arc<Tenancy>,
}

/// A range of a lease, locked against writers, so that the server can send the bytes without a
/// copy.
#[derive(Debug)]
pub struct Held<'a> {
    run: ReadRun<'a>,
    span: Span,
}

impl Lease {
    /// Wraps `pages`, of which `stored` are stored.
    pub(crate) fn new(record: LeaseRecord, pages: Pages, stored: usize, dir: Arc<Dir>) -> Self {
        Self {
            id: record.id,
            group: record.group.clone(),
            capacity: record.capacity.0,
            account: Account::new(record.id, record.quota, stored),
            retired: AtomicBool::new(false),
            tenancy: Tenancy::new(TenancyRecord {
                claim: record.claim.clone(),
                ousted: record.ousted.clone(),
            }),
            record: Mutex::new(record),
            pages,
            dir,
        }
    }

    /// Returns the lease's id.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Returns the incarnation of the lease's pages. It follows from the id: ids are random, so
    /// neither returns after the other ends.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.id.0)
    }

    /// Admits a visitor's connection once the older connections that it replaces have ended. The
    /// tenancy calls `end` when this connection must end in turn. The [`Stay`] MUST live until the
    /// server carries out nothing more for the connection.
    ///
    /// # Errors
    /// [`Denied`]: another owner has the lease (it names that owner), a newer connection has taken
    /// over, older ones do not end, or the claim cannot be recorded.
    pub fn admit(&self, visitor: &Visitor, end: End) -> Result<Stay, Denied> {
        let is_empty = || self.stored() == Bytes::ZERO;
        let record = |record| self.remember(record).map_err(|error| error.to_string());
        self.tenancy.admit(visitor, is_empty, record, end)
    }

    fn remember(&self, TenancyRecord { claim, ousted }: TenancyRecord) -> Result<(), StoreError> {
        let mut record = self.locked_record();
        if (&record.claim, &record.ousted) == (&claim, &ousted) {
            return Ok(());
        }
        self.check_alive()?;
        let changed = LeaseRecord { claim, ousted, ..record.clone() };
        changed.save(&self.dir.file(&Entry::Record(self.id)))?;
        *record = changed;
        Ok(())
    }

    /// Returns the host that may use the lease.
    pub fn borrower(&self) -> HostName {
        self.locked_record().borrower.clone()
    }

    /// Gives the lease to another host, and replaces the note of the program that uses the store.
    ///
    /// # Errors
    /// If the lease has ended, or its record cannot be written. The lease is as before then.
    pub fn give_to(&self, borrower: HostName, note: serde_json::Value) -> Result<(), StoreError> {
        let mut record = self.locked_record();
        self.check_alive()?;
        let changed = LeaseRecord { borrower, note, ..record.clone() };
        changed.save(&self.dir.file(&Entry::Record(self.id)))?;
        *record = changed;
        Ok(())
    }

    /// Returns the tenant to which the lease is accounted.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns the size of the lease's address space.
    pub fn capacity(&self) -> Bytes {
        Bytes(self.capacity)
    }

    /// Returns the most that the lease may store, rounded down to whole pages.
    pub fn quota(&self) -> Bytes {
        self.account.quota()
    }

    /// Returns how much the lease stores. Each page counts, even if other leases of the group share
    /// its frame.
    pub fn stored(&self) -> Bytes {
        self.account.stored()
    }

    /// Returns whether the lease keeps equal pages once, with the other sharing leases of its
    /// group.
    pub fn is_shared(&self) -> bool {
        matches!(self.pages, Pages::Shared(_))
    }

    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Returns the whole record, with the current note.
    pub fn record(&self) -> LeaseRecord {
        self.locked_record().clone()
    }

    /// Replaces the note, also in the file.
    ///
    /// # Errors
    /// [`StoreError::File`] if the record cannot be written; the old note stays.
    /// [`ExportError::Gone`] after the lease's removal.
    pub fn set_note(&self, note: serde_json::Value) -> Result<(), StoreError> {
        let mut record = self.locked_record();
        self.check_alive()?;
        let changed = LeaseRecord { note, ..record.clone() };
        changed.save(&self.dir.file(&Entry::Record(self.id)))?;
        *record = changed;
        Ok(())
    }

    /// Fills `buf` from `offset` on. Allocates neither heap memory nor pages of the lease.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`].
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ExportError> {
        let span = self.span(offset, buf.len() as u64)?;
        for chunk in span.chunks() {
            let run = self.pages.read(chunk);
            self.check_alive()?;
            for (pages, bytes) in run.pieces() {
                let target = &mut buf[span.of_span(&pages)];
                match bytes {
                    Some(bytes) => target.copy_from_slice(&bytes[span.of_pages(&pages)]),
                    None => target.fill(0),
                }
            }
        }
        Ok(())
    }

    /// Stores `data` at `offset`. Pages that become all zero take no RAM.
    ///
    /// # Errors
    /// [`ExportError::Full`] and [`ExportError::NoMemory`], after any part of the range has been
    /// written; [`ExportError::Range`], [`ExportError::Gone`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), ExportError> {
        let span = self.span(offset, data.len() as u64)?;
        for chunk in span.chunks() {
            let mut run = self.pages.write(chunk);
            self.check_alive()?;
            run.store(&span, data, &self.account)?;
        }
        Ok(())
    }

    /// Zeroes the range and frees its RAM. A page that is only partly in the range is freed if the
    /// rest of it is zero too.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`], [`ExportError::NoMemory`] if the kernel
    /// cannot free the pages or copy a shared page.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), ExportError> {
        let span = self.span(offset, length)?;
        self.check_alive()?;
        self.clear_all(&span)
    }

    /// Zeroes the range and stores all of it, so that later writes to it cannot exceed the quota.
    ///
    /// In a lease that does not share, each page takes RAM. In a sharing lease all of them share
    /// one frame, so later writes may still find the tmpfs full.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn allocate_zeroes(&self, offset: u64, length: u64) -> Result<(), ExportError> {
        let span = self.span(offset, length)?;
        for chunk in span.chunks() {
            let mut run = self.pages.write(chunk);
            self.check_alive()?;
            run.allocate_zeroes(&span, &self.account)?;
        }
        Ok(())
    }

    /// Returns the runs of stored pages and holes in the range, a snapshot without locks.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`].
    pub fn block_status(
        &self,
        offset: u64,
        length: u64,
    ) -> Result<impl Iterator<Item = Run>, ExportError> {
        let span = self.span(offset, length)?;
        self.check_alive()?;
        let runs = self.pages.peek_runs(span.pages());
        Ok(runs
            .map(move |(pages, stored)| Run { length: span.of_span(&pages).len() as u64, stored }))
    }

    /// Checks whether a request for the range can succeed; does nothing else.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`].
    pub fn check(&self, offset: u64, length: u64) -> Result<(), ExportError> {
        self.span(offset, length)?;
        self.check_alive()
    }

    /// Locks the range for reading; waits for writers.
    ///
    /// A thread that holds a range already MUST use [`try_hold`](Self::try_hold), or two threads
    /// could wait for each other. For the same reason a thread must not write while it holds a
    /// range.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`].
    pub fn hold(&self, offset: u64, length: u64) -> Result<Held<'_>, ExportError> {
        let span = self.span(offset, length)?;
        let run = self.pages.read(span.pages());
        self.check_alive()?;
        Ok(Held { run, span })
    }

    /// Locks the range for reading, or returns `None` if that would have to wait.
    ///
    /// # Errors
    /// [`ExportError::Range`], [`ExportError::Gone`].
    pub fn try_hold(&self, offset: u64, length: u64) -> Result<Option<Held<'_>>, ExportError> {
        let span = self.span(offset, length)?;
        let run = self.pages.try_read(span.pages());
        self.check_alive()?;
        Ok(run.map(|run| Held { run, span }))
    }

    /// Ends the lease: frees all its RAM at once, and later requests fail with
    /// [`ExportError::Gone`], even of connections that still hold the lease. Deletes the record
    /// first: after a crash in between, the next open deletes pages without a record.
    ///
    /// No writer can store a page that the sweep misses. A writer locks its page and then reads
    /// `retired`; the sweep sets `retired` and then looks at the page. All four operations are
    /// sequentially consistent, so a writer that the sweep misses sees the flag.
    pub(crate) fn retire(&self) -> Result<(), StoreError> {
        {
            let _no_new_record = self.locked_record();
            self.retired.store(true, Ordering::SeqCst);
            self.dir.delete(&Entry::Record(self.id))?;
        }
        self.clear_all(&Span::new(0, self.capacity))?;
        match &self.pages {
            Pages::Private(_) => self.dir.delete(&Entry::Pages(self.id)),
            Pages::Shared(shared) => {
                shared.frames().trim();
                self.dir.delete(&Entry::Table(self.id, self.group.clone()))
            }
        }
    }

    fn clear_all(&self, span: &Span) -> Result<(), ExportError> {
        let mut rest = span.pages();
        while let Some(start) = self.pages.first_not_idle(rest.clone()) {
            let chunk = start..rest.end.min(start + CHUNK_PAGES);
            let mut run = self.pages.write(chunk.clone());
            rest.start = chunk.end;
            run.clear(span, &self.account)?;
        }
        Ok(())
    }

    fn span(&self, offset: u64, length: u64) -> Result<Span, ExportError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.capacity) {
            Ok(Span::new(offset, length))
        } else {
            Err(ExportError::Range { lease: self.id, offset, length, capacity: self.capacity() })
        }
    }

    fn check_alive(&self) -> Result<(), ExportError> {
        if self.retired.load(Ordering::SeqCst) { Err(ExportError::Gone(self.id)) } else { Ok(()) }
    }

    fn locked_record(&self) -> MutexGuard<'_, LeaseRecord> {
        // One assignment replaces the record, so a panic in another thread cannot leave half a
        // record.
        lock(&self.record)
    }
}

impl Held<'_> {
    /// Returns the bytes in order, in as few pieces as possible.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        self.run.pieces().map(|(pages, bytes)| match bytes {
            Some(bytes) => Segment::Data(&bytes[self.span.of_pages(&pages)]),
            None => Segment::Hole(self.span.of_span(&pages).len()),
        })
    }
}
