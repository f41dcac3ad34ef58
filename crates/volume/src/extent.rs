//! An extent: its place, the pages of it that hold data, and I/O on it, even while it moves.

use std::array;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLockReadGuard, RwLockWriteGuard};

use aquifer_page::{EXTENT_SIZE, WorkerId};

use crate::bitmap::Bitmap;
use crate::fair_lock::FairLock;
use crate::holder::{HolderError, Piece};
use crate::lease::{Lease, Slot};
use crate::lock;

/// The parts of an extent, of 4 MiB each, that writes and discards lock separately.
const PARTS: usize = 16;

const PART: u64 = EXTENT_SIZE / PARTS as u64;

/// An extent of a volume.
///
/// Reads, writes and discards hold the place shared for their duration, so none waits for another
/// because of the place. A thread holds the place exclusively to place the extent, to copy a piece
/// of it, or to free its slot.
///
/// A discard holds the parts that it touches exclusively, and a write holds them shared. Otherwise
/// a discard could clear the bit of a page to which a write is in flight. Reads lock no part, so no
/// fault waits for a discard.
#[derive(Debug)]
pub(crate) struct Extent {
    place: FairLock<Place>,
    parts: [FairLock<()>; PARTS],
    /// Held by the thread that moves the extent.
    pub(crate) mover: Mutex<()>,
    pub(crate) written: Bitmap,
}

/// Returns the parts of an extent that bytes of it touch.
fn parts(bytes: &Range<u64>) -> Range<usize> {
    let end = bytes.end.div_ceil(PART).min(PARTS as u64);
    ((bytes.start / PART).min(end) as usize)..end as usize
}

#[derive(Debug)]
pub(crate) enum Place {
    /// No slot: the extent was never written, or holds nothing, and reads as zeroes.
    Nowhere,
    /// In a slot.
    At(Slot),
    /// On its way between two slots.
    Moving(Move),
}

/// An extent that moves. Bytes below `copied` are equal in both slots, and writes keep them so. The
/// rest is in `from` only.
#[derive(Debug)]
pub(crate) struct Move {
    pub(crate) from: Slot,
    pub(crate) to: Slot,
    pub(crate) copied: u64,
    /// Set when a write or discard could not reach `to`, so that the mover calls the move off.
    pub(crate) abandoned: AtomicBool,
    /// Held during a write to both slots, so that two writes to one page land in the same order.
    both: Mutex<()>,
}

/// The failure of a lender, or of the spill file.
#[derive(Debug)]
pub(crate) struct Failed(pub(crate) Arc<Lease>, pub(crate) HolderError);

/// The reason why an extent could not be written.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The extent has no place yet.
    Nowhere,
    /// The lender, or the spill file, failed.
    Holder(Arc<Lease>, HolderError),
}

impl Move {
    pub(crate) fn new(from: Slot, to: Slot) -> Self {
        Self { from, to, copied: 0, abandoned: AtomicBool::new(false), both: Mutex::new(()) }
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    fn write(&self, worker: WorkerId, at: u64, data: &[u8]) -> Result<(), HolderError> {
        if at >= self.copied || self.is_abandoned() {
            return self.from.write(worker, at, data);
        }
        let _both = lock(&self.both);
        self.from.write(worker, at, data)?;
        let length = data.len().min((self.copied - at) as usize);
        if self.to.write(worker, at, &data[..length]).is_err() {
            self.abandoned.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn discard(&self, worker: WorkerId, bytes: &Range<u64>) -> Result<(), HolderError> {
        self.from.discard(worker, bytes.start, bytes.end - bytes.start)?;
        let end = bytes.end.min(self.copied);
        if bytes.start < end
            && !self.is_abandoned()
            && self.to.discard(worker, bytes.start, end - bytes.start).is_err()
        {
            self.abandoned.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Place {
    /// Returns the slot that reads go to.
    pub(crate) fn slot(&self) -> Option<&Slot> {
        match self {
            Self::Nowhere => None,
            Self::At(slot) | Self::Moving(Move { from: slot, .. }) => Some(slot),
        }
    }

    fn fault(&self, error: HolderError) -> Fault {
        // No other change of the page was under way.
        let fault = |slot: &Slot| Fault::Holder(slot.lease.clone(), slot.judge(error));
        self.slot().map_or(Fault::Nowhere, fault)
    }
}

impl Extent {
    pub(crate) fn new() -> Self {
        Self {
            place: FairLock::new(Place::Nowhere),
            parts: array::from_fn(|_| FairLock::new(())),
            mover: Mutex::new(()),
            written: Bitmap::new(),
        }
    }

    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, Place> {
        self.place.read()
    }

    /// Does not wait: `None` if another thread has the place exclusively.
    pub(crate) fn try_shared(&self) -> Option<RwLockReadGuard<'_, Place>> {
        self.place.try_read()
    }

    pub(crate) fn alone(&self) -> RwLockWriteGuard<'_, Place> {
        self.place.write()
    }

    /// Waits until the threads that wait for the place have it.
    pub(crate) fn let_waiting_in(&self) {
        self.place.let_waiting_in();
    }

    /// Keeps discards away from these bytes during a write.
    fn keep(&self, bytes: &Range<u64>) -> [Option<RwLockReadGuard<'_, ()>>; PARTS] {
        let wanted = parts(bytes);
        array::from_fn(|part| wanted.contains(&part).then(|| self.parts[part].read()))
    }

    /// Keeps writes and other discards away from these bytes.
    fn claim(&self, bytes: &Range<u64>) -> [Option<RwLockWriteGuard<'_, ()>>; PARTS] {
        let wanted = parts(bytes);
        array::from_fn(|part| wanted.contains(&part).then(|| self.parts[part].write()))
    }

    /// Returns whether the extent has a place, without waiting. If another thread holds the place
    /// exclusively, the extent almost certainly has one, so this returns `true`.
    pub(crate) fn is_placed(&self) -> bool {
        self.try_shared().is_none_or(|place| place.slot().is_some())
    }

    /// Returns whether the extent is on `lease`, moving or not.
    pub(crate) fn is_on(&self, lease: &Arc<Lease>) -> bool {
        self.shared().slot().is_some_and(|slot| Arc::ptr_eq(&slot.lease, lease))
    }

    /// Reads from offset `at` on. Pages that were never written need no request.
    pub(crate) fn read(&self, worker: WorkerId, at: u64, into: &mut [u8]) -> Result<(), Failed> {
        let place = self.shared();
        let bytes = at..at + into.len() as u64;
        let stored = self.written.trim(&bytes);
        let (start, end) = ((stored.start - at) as usize, (stored.end - at) as usize);
        let Some(slot) = place.slot().filter(|_| start < end) else {
            into.fill(0);
            return Ok(());
        };
        into[..start].fill(0);
        into[end..].fill(0);
        let into = &mut into[start..end];
        slot.read(worker, stored.start, into)
            .or_else(|error| {
                if !matches!(error, HolderError::Wrong(_)) {
                    return Err(error);
                }
                // A write may have ended meanwhile: this time none is under way.
                let _parts = self.claim(&stored);
                slot.read(worker, stored.start, into).map_err(|error| slot.judge(error))
            })
            .map_err(|error| Failed(slot.lease.clone(), error))
    }

    /// Writes from offset `at` on.
    pub(crate) fn write(&self, worker: WorkerId, at: u64, data: &[u8]) -> Result<(), Fault> {
        let place = self.shared();
        if matches!(*place, Place::Nowhere) {
            return Err(Fault::Nowhere);
        }
        let bytes = at..at + data.len() as u64;
        let _parts = self.keep(&bytes);
        self.written.set(&bytes);
        let written = match &*place {
            Place::Nowhere => return Err(Fault::Nowhere),
            Place::At(slot) => slot.write(worker, at, data),
            Place::Moving(moving) => moving.write(worker, at, data),
        };
        written.map_err(|error| place.fault(error))
    }

    /// Writes runs, in flight together where that is faster. Afterwards the offsets in `pieces` are
    /// unspecified.
    pub(crate) fn write_many(
        &self,
        worker: WorkerId,
        pieces: &mut [Piece<'_>],
    ) -> Result<(), Fault> {
        let place = self.shared();
        if matches!(*place, Place::Nowhere) {
            return Err(Fault::Nowhere);
        }
        let ranges = pieces.iter().map(|(at, data)| *at..*at + data.len() as u64);
        let all = ranges.reduce(|all, next| all.start.min(next.start)..all.end.max(next.end));
        let _parts = self.keep(&all.unwrap_or_default());
        for (at, data) in &*pieces {
            self.written.set(&(*at..*at + data.len() as u64));
        }
        let written = match &*place {
            Place::Nowhere => return Err(Fault::Nowhere),
            Place::At(slot) => slot.write_many(worker, pieces),
            Place::Moving(moving) => {
                pieces.iter().try_for_each(|(at, data)| moving.write(worker, *at, data))
            }
        };
        written.map_err(|error| place.fault(error))
    }

    /// Makes these bytes read as zeroes and frees their room. If the extent then holds nothing,
    /// this calls `gone` and gives back the place.
    pub(crate) fn discard(
        &self,
        worker: WorkerId,
        bytes: &Range<u64>,
        gone: impl FnOnce(),
    ) -> Result<(), Fault> {
        self.empty(worker, bytes)?;
        if self.written.is_empty() && self.is_placed() {
            self.free(gone);
        }
        Ok(())
    }

    fn empty(&self, worker: WorkerId, bytes: &Range<u64>) -> Result<(), Fault> {
        let place = self.shared();
        if place.slot().is_none() || self.written.trim(bytes).is_empty() {
            return Ok(());
        }
        let _parts = self.claim(bytes);
        let stored = self.written.trim(bytes);
        let done = match &*place {
            Place::Nowhere => Ok(()),
            Place::At(slot) => slot.discard(worker, stored.start, stored.end - stored.start),
            Place::Moving(moving) => moving.discard(worker, &stored),
        };
        done.map_err(|error| place.fault(error))?;
        self.written.clear(&stored);
        if let Some(slot) = place.slot() {
            // The lender has some room again. A move discards its old slot without this, because an
            // extent that leaves a full lender is no such sign.
            slot.lease.full.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives the place back, after a call of `gone`, if the extent holds nothing. If the extent
    /// moves, its mover does this.
    pub(crate) fn free(&self, gone: impl FnOnce()) {
        let mut place = self.alone();
        if let Place::At(slot) = &*place
            && self.written.is_empty()
        {
            gone();
            slot.give_back(slot.is_of_zeroes());
            *place = Place::Nowhere;
        }
    }
}

const _: () = assert!(EXTENT_SIZE <= u32::MAX as u64);
