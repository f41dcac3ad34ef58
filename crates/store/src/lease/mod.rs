mod account;
mod own;
mod pages;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_page::{Bytes, Group, HostName, Incarnation, LeaseId};

pub(crate) use self::account::Account;
pub(crate) use self::pages::Pages;
use self::pages::ReadRun;
use crate::dir::{Dir, Entry};
use crate::span::{CHUNK_PAGES, Span};
use crate::tenancy::{Memory, Tenancy};
use crate::{Denied, End, LeaseRecord, Stay, StoreError, Visitor};

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
    account: Account,
    retired: AtomicBool,
    pages: Pages,
    dir: Arc<Dir>,
    tenancy: Arc<Tenancy>,
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
    /// Wraps `pages`, of which `stored` are stored.
    pub(crate) fn new(record: LeaseRecord, pages: Pages, stored: usize, dir: Arc<Dir>) -> Self {
        Self {
            id: record.id,
            borrower: record.borrower.clone(),
            group: record.group.clone(),
            capacity: record.capacity.0,
            account: Account::new(record.id, record.quota, stored),
            retired: AtomicBool::new(false),
            tenancy: Tenancy::new(Memory {
                claim: record.claim.clone(),
                ousted: record.ousted.clone(),
            }),
            record: Mutex::new(record),
            pages,
            dir,
        }
    }

    /// The lease's id.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// The life of its pages: a lease's id is random, and neither comes back once the other is gone.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.id.0)
    }

    /// Lets a visitor be connected, when the older connections that it replaces have ended: `end` is how this one is
    /// told to, when its time has come. The stay MUST last until nothing is carried out for the connection any more.
    ///
    /// # Errors
    /// [`Denied`], naming the present owner.
    pub fn admit(&self, visitor: &Visitor, end: End) -> Result<Stay, Denied> {
        let is_empty = || self.stored() == Bytes::ZERO;
        let record = |memory| self.remember(memory).map_err(|error| error.to_string());
        self.tenancy.admit(visitor, is_empty, record, end)
    }

    fn remember(&self, Memory { claim, ousted }: Memory) -> Result<(), StoreError> {
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
        self.account.quota()
    }

    /// What it stores now, each page counted, whether or not others of its group store the same.
    pub fn stored(&self) -> Bytes {
        self.account.stored()
    }

    /// Whether its equal pages, and those of the other sharing leases of its group, are kept once.
    pub fn is_shared(&self) -> bool {
        matches!(self.pages, Pages::Shared(_))
    }

    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
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
        changed.save(&self.dir.file(&Entry::Record(self.id)))?;
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

    /// Stores `data` at `offset`. Pages that are all zero afterwards take no RAM.
    ///
    /// # Errors
    /// [`StoreError::Full`] and [`StoreError::NoMemory`], with any part of the range written;
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let span = self.span(offset, data.len() as u64)?;
        for chunk in span.chunks() {
            let mut run = self.pages.write(chunk);
            self.check_alive()?;
            run.store(&span, data, &self.account)?;
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

    /// Makes the range read as zeroes and stores all of it, so that later writes to it cannot find the lease full.
    ///
    /// That takes RAM for all of it; where the lease shares, one page for all, so later writes may still find the tmpfs
    /// full.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn allocate_zeroes(&self, offset: u64, length: u64) -> Result<(), StoreError> {
        let span = self.span(offset, length)?;
        for chunk in span.chunks() {
            let mut run = self.pages.write(chunk);
            self.check_alive()?;
            run.allocate_zeroes(&span, &self.account)?;
        }
        Ok(())
    }

    /// The runs of stored and not stored bytes in the range, as they are just now.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn block_status(
        &self,
        offset: u64,
        length: u64,
    ) -> Result<impl Iterator<Item = Run>, StoreError> {
        let span = self.span(offset, length)?;
        self.check_alive()?;
        let runs = self.pages.peek_runs(span.pages());
        Ok(runs
            .map(move |(pages, stored)| Run { length: span.of_span(&pages).len() as u64, stored }))
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
        let run = self.pages.read(span.pages());
        self.check_alive()?;
        Ok(Held { run, span })
    }

    /// Holds the range for reading, or says `None` where that would need waiting.
    ///
    /// # Errors
    /// [`StoreError::Range`], [`StoreError::Gone`].
    pub fn try_hold(&self, offset: u64, length: u64) -> Result<Option<Held<'_>>, StoreError> {
        let span = self.span(offset, length)?;
        let run = self.pages.try_read(span.pages());
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
            self.dir.delete(&Entry::Record(self.id))?;
        }
        self.clear_all(&Span::new(0, self.capacity))?;
        match &self.pages {
            Pages::Own(_) => self.dir.delete(&Entry::Pages(self.id)),
            Pages::Shared(shared) => {
                shared.frames().trim();
                self.dir.delete(&Entry::Table(self.id, self.group.clone()))
            }
        }
    }

    fn clear_all(&self, span: &Span) -> Result<(), StoreError> {
        let mut rest = span.pages();
        while let Some(start) = self.pages.first_not_idle(rest.clone()) {
            let chunk = start..rest.end.min(start + CHUNK_PAGES);
            let mut run = self.pages.write(chunk.clone());
            rest.start = chunk.end;
            run.clear(span, &self.account)?;
        }
        Ok(())
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
        self.run.pieces().map(|(pages, bytes)| match bytes {
            Some(bytes) => Segment::Data(&bytes[self.span.of_pages(&pages)]),
            None => Segment::Hole(self.span.of_span(&pages).len()),
        })
    }
}
