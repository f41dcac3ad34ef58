//! One extent: where it is, which pages of it hold anything, and I/O on it, also while it moves.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use aquifer_fabric::sleep::going_to_sleep;

use aquifer_page::EXTENT_SIZE;

use crate::bitmap::Bitmap;
use crate::holder::{HolderError, Piece};
use crate::lease::{Lease, Slot};
use crate::lock;

/// An extent of a volume.
///
/// Reads and writes hold the lock shared for their duration, so they never wait for one another. Whoever discards, places, or
/// moves a piece holds it alone.
#[derive(Debug)]
pub(crate) struct Extent {
    place: RwLock<Place>,
    pub(crate) written: Bitmap,
}

#[derive(Debug)]
pub(crate) enum Place {
    /// Nothing was written to it: it reads as zeroes.
    Nowhere,
    /// In a slot.
    At(Slot),
    /// On its way between two slots.
    Moving(Move),
}

/// An extent on its way. What is below `copied` is the same in both slots, and is kept so; the rest is in `from` only.
#[derive(Debug)]
pub(crate) struct Move {
    pub(crate) from: Slot,
    pub(crate) to: Slot,
    pub(crate) copied: u64,
    /// A write could not reach `to`: the move is off.
    pub(crate) abandoned: AtomicBool,
    /// Held while both slots are written, lest two writes to one page land in different order.
    both: Mutex<()>,
}

/// Why an extent could not be read or written.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It has no place yet.
    Nowhere,
    /// What holds it failed.
    Holder(Arc<Lease>, HolderError),
}

impl Move {
    pub(crate) fn new(from: Slot, to: Slot) -> Self {
        Self { from, to, copied: 0, abandoned: AtomicBool::new(false), both: Mutex::new(()) }
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    fn write(&self, worker: usize, at: u64, data: &[u8]) -> Result<(), HolderError> {
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

    fn discard(&self, worker: usize, bytes: &Range<u64>) -> Result<(), HolderError> {
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
    /// Where reads go.
    pub(crate) fn slot(&self) -> Option<&Slot> {
        match self {
            Self::Nowhere => None,
            Self::At(slot) | Self::Moving(Move { from: slot, .. }) => Some(slot),
        }
    }

    fn fault(&self, error: HolderError) -> Fault {
        self.slot().map_or(Fault::Nowhere, |slot| Fault::Holder(slot.lease.clone(), error))
    }
}

impl Extent {
    pub(crate) fn new() -> Self {
        Self { place: RwLock::new(Place::Nowhere), written: Bitmap::new() }
    }

    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, Place> {
        match self.place.try_read() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => going_to_sleep(),
        }
        self.place.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn alone(&self) -> RwLockWriteGuard<'_, Place> {
        match self.place.try_write() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => going_to_sleep(),
        }
        self.place.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has a place, without waiting: where somebody holds it alone, that is as good as certain.
    pub(crate) fn is_placed(&self) -> bool {
        self.place.try_read().map_or(true, |place| place.slot().is_some())
    }

    /// Whether it is on `lease`, moving or not.
    pub(crate) fn is_on(&self, lease: &Arc<Lease>) -> bool {
        self.shared().slot().is_some_and(|slot| Arc::ptr_eq(&slot.lease, lease))
    }

    /// Reads from `at` on. Pages that were never written cost nothing.
    pub(crate) fn read(&self, worker: usize, at: u64, into: &mut [u8]) -> Result<(), Fault> {
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
        slot.read(worker, stored.start, &mut into[start..end]).map_err(|error| place.fault(error))
    }

    /// Writes from `at` on.
    pub(crate) fn write(&self, worker: usize, at: u64, data: &[u8]) -> Result<(), Fault> {
        let place = self.shared();
        if matches!(*place, Place::Nowhere) {
            return Err(Fault::Nowhere);
        }
        self.written.set(&(at..at + data.len() as u64));
        match &*place {
            Place::Nowhere => Err(Fault::Nowhere),
            Place::At(slot) => slot.write(worker, at, data).map_err(|error| place.fault(error)),
            Place::Moving(moving) => moving.write(worker, at, data).map_err(|error| place.fault(error)),
        }
    }

    /// Writes runs, whose offsets are lost, all under way at once where that is faster.
    pub(crate) fn write_many(&self, worker: usize, pieces: &mut [Piece<'_>]) -> Result<(), Fault> {
        let place = self.shared();
        if matches!(*place, Place::Nowhere) {
            return Err(Fault::Nowhere);
        }
        for (at, data) in &*pieces {
            self.written.set(&(*at..*at + data.len() as u64));
        }
        let written = match &*place {
            Place::Nowhere => return Err(Fault::Nowhere),
            Place::At(slot) => slot.write_many(worker, pieces),
            Place::Moving(moving) => pieces.iter().try_for_each(|(at, data)| moving.write(worker, *at, data)),
        };
        written.map_err(|error| place.fault(error))
    }

    /// Makes these bytes read as zeroes and gives their room back; an extent of which nothing is left gives back its place, after
    /// `gone` was told.
    pub(crate) fn discard(
        &self,
        worker: usize,
        bytes: &Range<u64>,
        gone: impl FnOnce(),
    ) -> Result<(), Fault> {
        let holds_nothing = |place: &Place| place.slot().is_none() || self.written.trim(bytes).is_empty();
        if holds_nothing(&self.shared()) {
            return Ok(());
        }
        let mut place = self.alone();
        if holds_nothing(&place) {
            return Ok(());
        }
        let stored = self.written.trim(bytes);
        let done = match &*place {
            Place::Nowhere => Ok(()),
            Place::At(slot) => slot.discard(worker, stored.start, stored.end - stored.start),
            Place::Moving(moving) => moving.discard(worker, &stored),
        };
        done.map_err(|error| place.fault(error))?;
        self.written.clear(&stored);
        if let Some(slot) = place.slot() {
            // It has room again, if only this much. (An extent that moves out because of it is no such sign.)
            slot.lease.full.store(false, Ordering::Relaxed);
        }
        if let Place::At(slot) = &*place
            && self.written.is_empty()
        {
            gone();
            slot.give_back(true);
            *place = Place::Nowhere;
        }
        Ok(())
    }
}

const _: () = assert!(EXTENT_SIZE <= u32::MAX as u64);
