//! The volume: requests cut at extents, extents placed when first written.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, VolumeId};

use crate::config::VolumeConfig;
use crate::error::PoolError;
use crate::events::{Event, Events, Happening, now_ms};
use crate::extent::{Extent, Fault, Place};
use crate::holder::{FileHolder, HolderError, Piece, SealedHolder};
use crate::lease::Lease;
use crate::mover;
use crate::placement::Leases;
use crate::seal::{Seal, Sealer};
use crate::status::{Counters, SpillStatus, VolumeStatus, lease_status};

/// How many lenders in a row may turn out to be full at one write.
const MOST_RELOCATIONS: usize = 4;

/// A linear address space over extents of leases.
///
/// All of it reads as zeroes until it is written. Any range of bytes may be read, written and discarded, by as many threads
/// at a time as it was made for, each under a number of its own below that (a number beyond is taken modulo). Nothing
/// allocates while all is well.
pub struct Volume {
    pub(crate) config: VolumeConfig,
    pub(crate) extents: Box<[Extent]>,
    pub(crate) leases: Leases,
    /// Held by whoever moves an extent: one at a time.
    pub(crate) mover_buffer: Mutex<Box<[u8]>>,
    /// How many wait for the mover with I/O that must not wait long.
    pub(crate) hurried: AtomicUsize,
    pub(crate) events: Arc<Events>,
    /// Held while a lease joins.
    pub(crate) joining: Mutex<()>,
    counters: Counters,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume")
            .field("config", &self.config)
            .field("leases", &self.leases)
            .finish_non_exhaustive()
    }
}

impl Volume {
    /// Makes a volume without leases: it reads as zeroes, and writes go to the spill file, if there is one.
    ///
    /// # Errors
    /// [`PoolError::Spill`].
    pub fn new(mut config: VolumeConfig) -> Result<Self, PoolError> {
        config.workers = config.workers.max(1);
        let extents = config.capacity.extents();
        let spill = config.spill.as_ref().map(|path| {
            let size = Bytes(extents * EXTENT_SIZE);
            let file = FileHolder::create(path, size, config.workers + 1)
                .map_err(|source| PoolError::Spill { path: path.clone(), source })?;
            // Nobody else knows the key, and nobody needs it once this process is gone, as the file is gone then, too.
            let sealer = Sealer::new(&Seal::own(), LeaseId::random());
            let file = SealedHolder::new(file, sealer, config.workers + 1);
            Ok(Lease::new(None, Box::new(file), extents as u32, |_| true))
        });
        Ok(Self {
            extents: (0..extents).map(|_| Extent::new()).collect(),
            leases: Leases::new(spill.transpose()?),
            mover_buffer: Mutex::new(mover::buffer()),
            hurried: AtomicUsize::new(0),
            events: Arc::default(),
            joining: Mutex::new(()),
            counters: Counters::default(),
            config,
        })
    }

    /// Its id.
    pub fn id(&self) -> VolumeId {
        self.config.id
    }

    /// Its size.
    pub fn capacity(&self) -> Bytes {
        self.config.capacity
    }

    /// How many threads it was made for.
    pub fn workers(&self) -> usize {
        self.config.workers
    }

    /// Fills the buffer. What was never written, or discarded, is zeroes, without asking anybody.
    ///
    /// # Errors
    /// [`PoolError`]; the buffer's contents are then unspecified.
    pub fn read(&self, worker: usize, offset: u64, into: &mut [u8]) -> Result<(), PoolError> {
        self.check(offset, into.len() as u64)?;
        let worker = worker % self.config.workers;
        let mut rest = &mut *into;
        for (index, bytes) in pieces(offset, rest.len() as u64) {
            let (now, later) = rest.split_at_mut((bytes.end - bytes.start) as usize);
            rest = later;
            match self.extents[index].read(worker, bytes.start, now) {
                Ok(()) => {}
                Err(Fault::Nowhere) => now.fill(0),
                Err(Fault::Holder(lease, error)) => {
                    let error = self.holder_error(index, bytes.start, &lease, error);
                    self.lost_page(&lease, &error);
                    return Err(error);
                }
            }
        }
        self.counters.read(into.len());
        Ok(())
    }

    /// Writes the data. An extent is placed at its first write, and placed anew when its lender is full.
    ///
    /// # Errors
    /// [`PoolError`]; any part may then have been written.
    pub fn write(&self, worker: usize, offset: u64, data: &[u8]) -> Result<(), PoolError> {
        self.check(offset, data.len() as u64)?;
        let worker = worker % self.config.workers;
        let mut rest = data;
        for (index, bytes) in pieces(offset, data.len() as u64) {
            let (now, later) = rest.split_at((bytes.end - bytes.start) as usize);
            self.write_piece(worker, index, bytes.start, now)?;
            rest = later;
        }
        self.counters.written(data.len());
        Ok(())
    }

    /// Writes runs, in ascending order, with those under way at once that go to one place: what takes a while is done once for many of
    /// them. Allocates.
    ///
    /// # Errors
    /// As `write`.
    pub fn write_many(&self, worker: usize, runs: &[Piece<'_>]) -> Result<(), PoolError> {
        let worker = worker % self.config.workers;
        let mut parts = Vec::with_capacity(runs.len());
        for (offset, data) in runs {
            self.check(*offset, data.len() as u64)?;
            let mut rest = *data;
            for (index, bytes) in pieces(*offset, data.len() as u64) {
                let (now, later) = rest.split_at((bytes.end - bytes.start) as usize);
                rest = later;
                parts.push((index, (bytes.start, now)));
            }
        }
        for of_extent in parts.chunk_by(|one, other| one.0 == other.0) {
            let index = of_extent[0].0;
            let mut together: Vec<_> = of_extent.iter().map(|(_, piece)| *piece).collect();
            if self.extents[index].write_many(worker, &mut together).is_err() {
                // It has no place yet, or its lender is full or away: each says so, and what there is to do is done.
                for (_, (at, data)) in of_extent {
                    self.write_piece(worker, index, *at, data)?;
                }
            }
        }
        runs.iter().for_each(|(_, data)| self.counters.written(data.len()));
        Ok(())
    }

    fn write_piece(
        &self,
        worker: usize,
        index: usize,
        at: u64,
        data: &[u8],
    ) -> Result<(), PoolError> {
        let mut relocations = 0;
        loop {
            match self.extents[index].write(worker, at, data) {
                Ok(()) => return Ok(()),
                Err(Fault::Nowhere) => self.place(worker, index)?,
                Err(Fault::Holder(lease, error @ HolderError::Full(_)))
                    if relocations < MOST_RELOCATIONS =>
                {
                    relocations += 1;
                    // Without room elsewhere, that the lender is full says more.
                    if self.relocate(index, &lease).is_err() {
                        return Err(self.holder_error(index, at, &lease, error));
                    }
                }
                Err(Fault::Holder(lease, error)) => {
                    return Err(self.holder_error(index, at, &lease, error));
                }
            }
        }
    }

    /// Gives the extent a place, if it has none.
    fn place(&self, worker: usize, index: usize) -> Result<(), PoolError> {
        let mut place = self.extents[index].alone();
        if matches!(*place, Place::Nowhere) {
            match self.leases.take(worker, &mut Vec::new()) {
                Ok(Some(slot)) => {
                    self.note(index, slot.place());
                    self.counters.found_room();
                    if slot.lease.target.is_none() {
                        self.spills();
                    }
                    *place = Place::At(slot);
                }
                Ok(None) => return Err(self.no_room()),
                Err((lease, error)) => return Err(self.holder_error(index, 0, &lease, error)),
            }
        }
        Ok(())
    }

    /// Makes the range read as zeroes and gives its room back to the lenders. Extents that hold nothing any more give
    /// back their place.
    ///
    /// # Errors
    /// [`PoolError`]; any part may then have been discarded.
    pub fn discard(&self, worker: usize, offset: u64, length: u64) -> Result<(), PoolError> {
        self.check(offset, length)?;
        let worker = worker % self.config.workers;
        for (index, bytes) in pieces(offset, length) {
            match self.extents[index].discard(worker, &bytes, || self.note(index, None)) {
                Ok(()) | Err(Fault::Nowhere) => {}
                Err(Fault::Holder(lease, error)) => {
                    return Err(self.holder_error(index, bytes.start, &lease, error));
                }
            }
        }
        self.counters.discarded(length);
        Ok(())
    }

    /// Makes the range read as zeroes: as cheap as, and the same as, [`discard`](Self::discard).
    ///
    /// # Errors
    /// As `discard`.
    pub fn write_zeroes(&self, worker: usize, offset: u64, length: u64) -> Result<(), PoolError> {
        self.discard(worker, offset, length)
    }

    /// Makes what was acknowledged permanent, where lenders have anything more permanent than their RAM.
    ///
    /// # Errors
    /// [`PoolError`], of the first lender that failed.
    pub fn flush(&self, worker: usize) -> Result<(), PoolError> {
        let worker = worker % self.config.workers;
        let mut at = 0;
        // Not under the list's lock: a lender may take its time.
        while let Some(lease) = { self.leases.list().get(at).cloned() } {
            at += 1;
            lease.holder.flush(worker).map_err(|error| self.holder_error(0, 0, &lease, error))?;
        }
        Ok(())
    }

    /// How the volume is. Tries whether lenders that were unreachable are back, which takes about a second for one that
    /// is not.
    pub fn status(&self) -> VolumeStatus {
        // Not under the list's lock: trying takes time.
        let leases: Vec<_> = self.leases.list().clone();
        leases.iter().for_each(|lease| lease.holder.probe());
        self.note_lenders_back(&leases);
        self.known_status()
    }

    /// How the volume is as far as is known: nobody waits for a lender. This is the one for a volume under
    /// [`Upkeep`](crate::Upkeep), which tries lost lenders.
    pub fn known_status(&self) -> VolumeStatus {
        let leases: Vec<_> = self.leases.list().clone();
        let states = leases.iter().filter_map(|lease| lease_status(lease)).collect();
        let (errors, failed_reads, last_error) = self.counters.errors();
        let spill = self.leases.spill.as_ref();
        VolumeStatus {
            id: self.id(),
            capacity: self.capacity(),
            placed_extents: self.extents.iter().filter(|extent| extent.is_placed()).count() as u64,
            written: Bytes(
                self.extents.iter().map(|extent| extent.written.count()).sum::<u64>()
                    * PAGE_SIZE as u64,
            ),
            traffic: self.counters.traffic(),
            leases: states,
            spill: spill.map(|spill| SpillStatus {
                used_extents: spill.taken(),
                held: self.held_by(spill),
            }),
            errors,
            failed_reads,
            last_error_at_ms: last_error.as_ref().map(|error| error.at_ms),
            last_error: last_error.map(|error| error.text),
            events: self.events_after(0),
        }
    }

    /// The events after the one of this number that are still remembered. Asks no lender.
    pub fn events_after(&self, number: u64) -> Vec<Event> {
        self.events.after(number)
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), PoolError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.config.capacity.0) {
            return Ok(());
        }
        Err(PoolError::OutOfRange {
            volume: self.id(),
            offset,
            length,
            capacity: self.config.capacity,
        })
    }

    /// The owner of the volume has moved to this host for good. Before lenders do anything more for this volume, they end
    /// the connections of the hosts that it came from, and let them in no more.
    pub fn end_older_generations(&self) {
        self.leases.list().iter().for_each(|lease| lease.holder.end_older());
    }

    /// Tries lenders that were lost; whether none is now.
    pub(crate) fn try_lost_lenders(&self) -> bool {
        let leases: Vec<_> = self.leases.list().clone();
        // All are probed, also behind one that does not answer.
        leases.iter().filter(|lease| lease.is_away()).for_each(|lease| lease.holder.probe());
        self.note_lenders_back(&leases)
    }

    /// Tells which of the lost lenders were found to answer; whether none is lost now.
    fn note_lenders_back(&self, leases: &[Arc<Lease>]) -> bool {
        let is_back = |lease: &Arc<Lease>| {
            if !lease.is_away() {
                return true;
            }
            if !lease.answers() {
                return false;
            }
            let since = lease.away_since.swap(0, Ordering::Relaxed);
            if let Some(target) = lease.target.as_ref().filter(|_| since != 0) {
                lease.lost_page.store(false, Ordering::Relaxed);
                self.counters.recovered(target.lease);
                let away_ms = now_ms().saturating_sub(since);
                let (lease, lender) = (target.lease, target.lender.clone());
                self.events.happened(Happening::LenderBack { lease, lender, away_ms });
            }
            true
        };
        // Each is told, also behind one that does not answer.
        let away = leases.iter().filter(|lease| !is_back(lease)).count();
        away == 0
    }

    /// A page could not be read.
    fn lost_page(&self, lease: &Lease, error: &PoolError) {
        self.counters.failed_read();
        let PoolError::Holder { page, place, source, .. } = error else { return };
        if !lease.lost_page.swap(true, Ordering::Relaxed) {
            let (place, why) = (place.clone(), source.to_string());
            self.events.happened(Happening::PageLost { page: *page, place, why });
        }
    }

    /// An extent is about to be in the spill file.
    pub(crate) fn spills(&self) {
        if !self.counters.spills.swap(true, Ordering::Relaxed) {
            self.events.happened(Happening::SpillStarted);
        }
    }

    /// Whether extents are in the spill file.
    pub(crate) fn is_spilling(&self) -> bool {
        let is = self.leases.spill.as_ref().is_some_and(|spill| spill.taken() > 0);
        if !is && self.counters.spills.swap(false, Ordering::Relaxed) {
            self.events.happened(Happening::SpillEnded);
        }
        is
    }

    /// Tells the ledger, if there is one.
    pub(crate) fn note(&self, extent: usize, place: Option<(LeaseId, u32)>) {
        if let Some(ledger) = &self.config.ledger {
            ledger.note(extent, place);
        }
    }

    /// The number under which extents are moved.
    pub(crate) fn mover_worker(&self) -> usize {
        self.config.workers
    }

    pub(crate) fn no_room(&self) -> PoolError {
        self.failed(None, PoolError::NoRoom(self.id()))
    }

    /// The error, which is what `status` shows until the lease it is of answers again.
    pub(crate) fn failed(&self, lease: Option<LeaseId>, error: PoolError) -> PoolError {
        self.counters.failed(error.to_string(), lease);
        error
    }

    /// The error with all that is known about where it happened.
    pub(crate) fn holder_error(
        &self,
        extent: usize,
        at: u64,
        lease: &Lease,
        source: HolderError,
    ) -> PoolError {
        let page = (extent as u64 * EXTENT_SIZE + at) / PAGE_SIZE as u64;
        let target = lease.target.as_ref();
        if let Some(target) = target.filter(|_| !lease.answers())
            && lease.away_since.swap(now_ms(), Ordering::Relaxed) == 0
        {
            let (lease, lender, why) = (target.lease, target.lender.clone(), source.to_string());
            self.events.happened(Happening::LenderLost { lease, lender, why });
        }
        let id = target.map(|target| target.lease);
        self.failed(
            id,
            PoolError::Holder { volume: self.id(), page, place: lease.to_string(), source },
        )
    }
}

/// The range cut at extents: the extent, and the bytes within it.
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = (usize, Range<u64>)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let index = at / EXTENT_SIZE;
        let stop = end.min((index + 1) * EXTENT_SIZE);
        let bytes = at - index * EXTENT_SIZE..stop - index * EXTENT_SIZE;
        at = stop;
        Some((index as usize, bytes))
    })
}
