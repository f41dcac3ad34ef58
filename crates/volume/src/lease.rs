//! A lease (or the spill file) as a row of slots, each the size of an extent.

use std::cmp::Reverse;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, PAGES_PER_EXTENT, WorkerId};

use crate::holder::{Copies, Copy, Holder, HolderError, Piece, Wrong};
use crate::lock;
use crate::target::LeaseTarget;

/// A holder of extents, and the state of its slots.
pub(crate) struct Lease {
    /// The lease; `None` for the spill file.
    pub(crate) target: Option<LeaseTarget>,
    /// The lease in entries of a ledger; `None` for a spill file that ends with its process.
    pub(crate) noted_as: Option<LeaseId>,
    pub(crate) holder: Copies,
    /// The number of slots.
    pub(crate) total: u64,
    /// Set when the lender reports no room although slots are free: it promised more than it has.
    pub(crate) full: AtomicBool,
    /// The time of the last I/O that failed because the lender does not answer, in milliseconds
    /// since the Unix epoch; 0 while it answers.
    pub(crate) away_since: AtomicU64,
    /// Set when a page could not be read, and cleared when the lost lender is back.
    pub(crate) lost_page: AtomicBool,
    /// Set when the lender returned a page that is not the one stored there: it has lost that, or
    /// lies.
    wrong: AtomicBool,
    /// Extents to move out and extents moved, during an evacuation.
    pub(crate) leaving: (AtomicU64, AtomicU64),
    /// How often each slot was read lately.
    reads: Box<[AtomicU32]>,
    slots: Mutex<Slots>,
}

#[derive(Debug)]
struct Slots {
    /// Free, and all zeroes.
    clean: Vec<u32>,
    /// Free, but with leftovers.
    dirty: Vec<u32>,
    /// Whether the lease gives out slots; an evacuation closes it.
    open: bool,
}

/// The place of an extent, taken until it is [given back](Slot::give_back).
#[derive(Clone)]
pub(crate) struct Slot {
    pub(crate) lease: Arc<Lease>,
    index: u32,
}

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Some(target) => write!(f, "lender {}, lease {}", target.lender, target.lease),
            None => f.write_str("the spill file"),
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("target", &self.target)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {} of {}", self.index, self.lease)
    }
}

impl Lease {
    /// Makes a lease with `total` free slots. `is_clean` tells which are known to be all zeroes.
    pub(crate) fn new(copy: Copy, total: u32, mut is_clean: impl FnMut(u32) -> bool) -> Self {
        // The lowest clean slot is taken first. Both lists reserve room for all slots, so that
        // giving back does not allocate.
        let mut slots = Slots { clean: Vec::new(), dirty: Vec::new(), open: true };
        slots.clean.reserve_exact(total as usize);
        slots.dirty.reserve_exact(total as usize);
        for index in (0..total).rev() {
            if is_clean(index) { slots.clean.push(index) } else { slots.dirty.push(index) }
        }
        Self {
            noted_as: copy.target.as_ref().map(|target| target.lease),
            target: copy.target.clone(),
            holder: Copies::one(copy),
            total: u64::from(total),
            full: AtomicBool::new(false),
            away_since: AtomicU64::new(0),
            lost_page: AtomicBool::new(false),
            wrong: AtomicBool::new(false),
            leaving: (AtomicU64::new(0), AtomicU64::new(0)),
            reads: (0..total).map(|_| AtomicU32::new(0)).collect(),
            slots: Mutex::new(slots),
        }
    }

    /// Returns the number of slots that can be taken.
    pub(crate) fn free(&self) -> u64 {
        let slots = lock(&self.slots);
        if slots.open { (slots.clean.len() + slots.dirty.len()) as u64 } else { 0 }
    }

    /// Returns the number of slots that hold extents.
    pub(crate) fn taken(&self) -> u64 {
        let slots = lock(&self.slots);
        self.total - (slots.clean.len() + slots.dirty.len()) as u64
    }

    /// Returns how often all slots were read lately.
    pub(crate) fn reads(&self) -> u64 {
        self.reads.iter().map(|reads| u64::from(reads.load(Ordering::Relaxed))).sum()
    }

    /// Returns all slots. Those that were read most lately come first.
    pub(crate) fn most_read_first(&self) -> Vec<u32> {
        let mut slots: Vec<_> = (0..self.total as u32).collect();
        let reads = |slot: &u32| self.reads[*slot as usize].load(Ordering::Relaxed);
        slots.sort_by_cached_key(|slot| Reverse(reads(slot)));
        slots
    }

    /// Lets earlier reads count for less.
    pub(crate) fn forget_reads(&self) {
        for reads in &self.reads {
            let now = reads.load(Ordering::Relaxed);
            reads.fetch_sub(now.div_ceil(8), Ordering::Relaxed);
        }
    }

    /// Returns the pages of a slot.
    pub(crate) fn pages_of(slot: u32) -> Range<u64> {
        let first = u64::from(slot) * PAGES_PER_EXTENT;
        first..first + PAGES_PER_EXTENT
    }

    /// Returns how much only the second copy, and only the first copy, has.
    pub(crate) fn missing(&self, strictly: bool) -> (Bytes, Bytes) {
        self.holder.missing(0..self.total * PAGES_PER_EXTENT, strictly)
    }

    /// Returns whether the lender answers and has the stored data, as far as is known.
    pub(crate) fn answers(&self) -> bool {
        self.holder.unreachable_for().is_none() && !self.is_lost()
    }

    /// Returns whether I/O has failed because the lender does not answer, and the lender has not
    /// come back since.
    pub(crate) fn is_away(&self) -> bool {
        self.away_since.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the lender answers and has room, as far as is known.
    pub(crate) fn is_healthy(&self) -> bool {
        self.answers() && !self.full.load(Ordering::Relaxed) && !self.holder.has_full()
    }

    /// Returns whether the lender is known to have lost the stored data.
    pub(crate) fn is_lost(&self) -> bool {
        self.holder.is_lost() || self.wrong.load(Ordering::Relaxed)
    }

    /// Takes a free slot and makes it all zeroes. Returns `None` if no slot can be taken.
    pub(crate) fn take(self: &Arc<Self>, worker: WorkerId) -> Result<Option<Slot>, HolderError> {
        let (index, clean) = {
            let mut slots = lock(&self.slots);
            if !slots.open {
                return Ok(None);
            }
            match (slots.clean.pop(), slots.dirty.is_empty()) {
                (Some(index), _) => (index, true),
                (None, true) => return Ok(None),
                (None, false) => (slots.dirty.remove(0), false),
            }
        };
        let slot = Slot { lease: self.clone(), index };
        if !clean && let Err(error) = slot.discard(worker, 0, EXTENT_SIZE) {
            slot.give_back(false);
            return Err(error);
        }
        Ok(Some(slot))
    }

    /// Takes this slot as it is, if it is free.
    pub(crate) fn take_slot(self: &Arc<Self>, index: u32) -> Option<Slot> {
        let mut slots = lock(&self.slots);
        let Slots { clean, dirty, .. } = &mut *slots;
        let list = [clean, dirty].into_iter().find(|list| list.contains(&index))?;
        list.retain(|free| *free != index);
        Some(Slot { lease: self.clone(), index })
    }

    /// Discards what an unused slot may hold. An earlier process may have died between the move of
    /// an extent and the discard of its old slot. Returns false if no such slot is left, or the
    /// lender does not answer.
    pub(crate) fn discard_leftover(self: &Arc<Self>, worker: WorkerId) -> bool {
        if !self.answers() {
            return false;
        }
        let Some(index) = lock(&self.slots).dirty.pop() else { return false };
        let slot = Slot { lease: self.clone(), index };
        let discarded = slot.discard(worker, 0, EXTENT_SIZE).is_ok();
        slot.give_back(discarded);
        discarded
    }

    /// Notes that unused slots may hold anything, as another process has used the lease.
    pub(crate) fn distrust(&self) {
        let Slots { clean, dirty, .. } = &mut *lock(&self.slots);
        dirty.append(clean);
    }

    /// Starts or stops giving out slots. Returns whether that changed anything.
    pub(crate) fn set_open(&self, open: bool) -> bool {
        let mut slots = lock(&self.slots);
        std::mem::replace(&mut slots.open, open) != open
    }

    pub(crate) fn is_open(&self) -> bool {
        lock(&self.slots).open
    }
}

impl Slot {
    /// Returns the slot's entry in a ledger; `None` for a spill file that ends with its process.
    pub(crate) fn place(&self) -> Option<(LeaseId, u32)> {
        self.lease.noted_as.map(|lease| (lease, self.index))
    }

    /// Returns the error of a read during which no write of these pages was under way. If the
    /// lender returned another page than the one stored there, this marks the lease.
    #[cold]
    pub(crate) fn judge(&self, error: HolderError) -> HolderError {
        match error {
            HolderError::Wrong(wrong @ (Wrong::Zeroes | Wrong::Other)) => {
                self.lease.wrong.store(true, Ordering::Relaxed);
                HolderError::Lost(wrong.into())
            }
            HolderError::Wrong(wrong @ Wrong::Unknown) => HolderError::Failed(wrong.into()),
            other => other,
        }
    }

    /// Returns the number in the lease of the slot's page at this offset.
    fn page(&self, at: u64) -> u64 {
        u64::from(self.index) * PAGES_PER_EXTENT + at / PAGE_SIZE as u64
    }

    /// Returns whether the last write of the page at this offset failed.
    pub(crate) fn is_unknown(&self, at: u64) -> bool {
        self.lease.holder.is_unknown(self.page(at))
    }

    /// Records that the slot may hold any version of the page at this offset.
    pub(crate) fn forget(&self, at: u64) {
        self.lease.holder.forget(self.page(at));
    }

    /// Returns whether all pages are known to be zeroes. A discard may not have reached one.
    pub(crate) fn is_of_zeroes(&self) -> bool {
        let first = self.page(0);
        (first..first + PAGES_PER_EXTENT)
            .all(|page| self.lease.holder.first.tags.is_of_zeroes(page))
    }

    /// Returns the tags of the slot's pages.
    pub(crate) fn tags(&self) -> Vec<u64> {
        let first = self.page(0);
        self.lease.holder.first.tags.of(first..first + PAGES_PER_EXTENT)
    }

    /// Sets the tags of the slot's first pages.
    pub(crate) fn put_tags(&self, tags: &[u64]) {
        self.lease.holder.first.tags.put(self.page(0), tags);
    }

    fn offset(&self) -> u64 {
        u64::from(self.index) * EXTENT_SIZE
    }

    /// Ends the use of the slot; `clean` says whether it is all zeroes. The caller uses no other
    /// handle to the slot afterwards.
    pub(crate) fn give_back(&self, clean: bool) {
        let mut slots = lock(&self.lease.slots);
        if clean {
            slots.clean.push(self.index);
        } else {
            slots.dirty.push(self.index);
        }
    }

    pub(crate) fn read(
        &self,
        worker: WorkerId,
        at: u64,
        into: &mut [u8],
    ) -> Result<(), HolderError> {
        self.note_reads(1);
        self.lease.holder.read(worker, self.offset() + at, into)
    }

    /// Returns the offset in the holder of bytes of the slot, which the caller is about to read.
    pub(crate) fn will_read(&self, at: u64) -> u64 {
        self.note_reads(1);
        self.offset() + at
    }

    pub(crate) fn write(&self, worker: WorkerId, at: u64, data: &[u8]) -> Result<(), HolderError> {
        let result = self.lease.holder.write(worker, self.offset() + at, data);
        self.note(&result);
        result
    }

    pub(crate) fn discard(
        &self,
        worker: WorkerId,
        at: u64,
        length: u64,
    ) -> Result<(), HolderError> {
        self.lease.holder.discard(worker, self.offset() + at, length)
    }

    /// Writes runs. It changes the offsets in `pieces` to those in the holder.
    pub(crate) fn write_many(
        &self,
        worker: WorkerId,
        pieces: &mut [Piece<'_>],
    ) -> Result<(), HolderError> {
        pieces.iter_mut().for_each(|(offset, _)| *offset += self.offset());
        let result = self.lease.holder.write_many(worker, pieces);
        self.note(&result);
        result
    }

    fn note_reads(&self, count: u32) {
        self.lease.reads[self.index as usize].fetch_add(count, Ordering::Relaxed);
    }

    fn note(&self, result: &Result<(), HolderError>) {
        if matches!(result, Err(HolderError::Full(_))) {
            self.lease.full.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holder::{BrokenHolder, VerifiedHolder};
    use crate::tags::Tags;

    #[test]
    fn the_slots_that_were_read_most_lately_come_first() {
        let tags = Arc::new(Tags::new(4 * PAGES_PER_EXTENT));
        let broken = Box::new(BrokenHolder("no lender".to_owned()));
        let holder = VerifiedHolder::new(broken, None, tags.clone(), 1);
        let lease = Arc::new(Lease::new(Copy::new(None, holder, tags), 4, |_| true));
        let read = |index, times| {
            let slot = Slot { lease: lease.clone(), index };
            (0..times).for_each(|_| _ = slot.read(WorkerId(0), 0, &mut [0; PAGE_SIZE]));
        };
        read(1, 1);
        read(3, 1000);
        assert_eq!(lease.most_read_first()[..2], [3, 1]);
        assert_eq!(lease.reads(), 1001);
        (0..100).for_each(|_| lease.forget_reads());
        assert_eq!(lease.reads(), 0);
        read(2, 1);
        assert_eq!(lease.most_read_first()[0], 2);
        assert_eq!(Lease::pages_of(2), 2 * PAGES_PER_EXTENT..3 * PAGES_PER_EXTENT);
    }
}
