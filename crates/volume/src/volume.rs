//! The volume: it cuts requests at extents, and places an extent at its first write.

use std::fmt;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use aquifer_page::{Bytes, EXTENT_SIZE, ExtentIndex, LeaseId, PAGE_SIZE, VolumeId, WorkerId};
use aquifer_transport::tls::Identity;

use crate::config::VolumeConfig;
use crate::disk_copies::DiskKeeper;
use crate::error::VolumeError;
use crate::events::{Event, Events, Happening, now_ms};
use crate::extent::{Extent, Failed, Fault, Place};
use crate::holder::{Holder as _, HolderError, Piece};
use crate::lease::Lease;
use crate::mover::{Destinations, Movers};
use crate::placement::{Leases, lease_id};
use crate::status::{Counters, SpillStatus, VolumeStatus, lease_status};
use crate::target::LeaseTarget;

/// The number of full lenders in a row that one write may meet.
const MOST_RELOCATIONS: usize = 4;

/// A linear address space over extents of leases.
///
/// All of it reads as zeroes until it is written. As many threads as it was made for may read,
/// write and discard any ranges of bytes at a time. Each thread uses its own number below that
/// count; larger numbers are taken modulo. Unless an operation fails, only
/// [`read_many`](Self::read_many) and [`write_many`](Self::write_many) allocate.
pub struct Volume {
    pub(crate) config: VolumeConfig,
    pub(crate) extents: Box<[Extent]>,
    pub(crate) leases: Leases,
    pub(crate) movers: Movers,
    /// No extent may move.
    pub(crate) held: AtomicBool,
    pub(crate) events: Arc<Events>,
    /// Held while a lease is added: one at a time.
    pub(crate) adding_lease: Mutex<()>,
    /// Keeps second copies of all leases' pages on this host's disk.
    pub(crate) disk: OnceLock<DiskKeeper>,
    /// This host's certificate, if it came after the volume was made.
    identity: OnceLock<Identity>,
    pub(crate) counters: Counters,
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
    /// Makes a volume without leases. It reads as zeroes, and writes go to the spill file, if there
    /// is one.
    ///
    /// # Errors
    /// [`VolumeError::Spill`] if the spill file cannot be made.
    pub fn new(mut config: VolumeConfig) -> Result<Self, VolumeError> {
        config.workers = config.workers.max(1);
        let extents = config.capacity.extents();
        let volume = Self {
            extents: (0..extents).map(|_| Extent::new()).collect(),
            leases: Leases::new(),
            movers: Movers::new(),
            held: AtomicBool::new(false),
            events: Arc::default(),
            adding_lease: Mutex::new(()),
            disk: OnceLock::new(),
            identity: OnceLock::new(),
            counters: Counters::default(),
            config,
        };
        if let Some(directory) = &volume.config.spill {
            volume.add_unnamed_spill(directory)?;
        }
        Ok(volume)
    }

    /// Returns the volume's id.
    pub fn id(&self) -> VolumeId {
        self.config.id
    }

    /// Returns this host's certificate, which `secure` leases need.
    pub fn identity(&self) -> Option<&Identity> {
        self.config.tls.as_ref().or(self.identity.get())
    }

    /// Gives a volume that has no certificate this one. A volume keeps its first.
    pub fn identify(&self, identity: Identity) {
        _ = self.identity.set(identity);
    }

    /// Returns whether the volume has a lease or a spill file.
    pub fn has_room(&self) -> bool {
        self.leases.spill().is_some() || !self.leases.list().is_empty()
    }

    /// Returns how much of the volume's extents its leases, except these, cannot store. The spill
    /// file does not count.
    pub fn shortage(&self, without: &[LeaseId]) -> Bytes {
        let leases = self.leases.list();
        let is_without = |lease: &Lease| lease_id(lease).is_some_and(|id| without.contains(&id));
        let others = leases.iter().filter(|lease| !is_without(lease));
        let slots = others.map(|lease| lease.total).sum();
        Bytes(self.config.capacity.extents().saturating_sub(slots) * EXTENT_SIZE)
    }

    /// Returns the number of extents that could get a place at lenders now; `None` if every extent
    /// that has none could, also those on leases that are being evacuated. If a volume has a
    /// spill file and no lease, every extent finds a place.
    pub fn free_slots(&self) -> Option<u64> {
        let leases = self.leases.list();
        let open = leases.iter().filter(|lease| lease.is_open());
        let taken: u64 = open.map(|lease| lease.taken()).sum();
        let healthy = leases.iter().filter(|lease| lease.is_healthy());
        let free: u64 = healthy.map(|lease| lease.free()).sum();
        let placeless = (self.extents.len() as u64).saturating_sub(taken);
        let only_spills = leases.is_empty() && self.leases.spill().is_some();
        (!only_spills && free < placeless).then_some(free)
    }

    /// Returns whether the extent is on a lease that keeps it, without waiting: the lender answers,
    /// and the lease is not being evacuated.
    pub fn keeps(&self, extent: ExtentIndex) -> bool {
        let place = self.extents.get(extent.0 as usize).and_then(Extent::try_shared);
        let keeps = |lease: &Lease| lease.is_open() && lease.answers();
        place.is_some_and(|place| place.slot().is_some_and(|slot| keeps(&slot.lease)))
    }

    /// Returns whether a lender that has extents does not answer, or has lost pages.
    pub fn misses_lenders(&self) -> bool {
        self.leases.list().iter().any(|lease| lease.taken() > 0 && !lease.answers())
    }

    /// Returns whether the extent is on a lease whose lender does not answer or has lost pages.
    pub fn is_away(&self, extent: ExtentIndex) -> bool {
        let place = self.extents.get(extent.0 as usize).and_then(Extent::try_shared);
        place.is_some_and(|place| place.slot().is_some_and(|slot| !slot.lease.answers()))
    }

    /// Returns whether the extent is on this lease, or in the spill file of this id.
    pub fn is_on(&self, extent: ExtentIndex, lease: LeaseId) -> bool {
        let place = self.extents.get(extent.0 as usize).map(Extent::shared);
        let on = |place: &Place| place.slot().and_then(|slot| slot.lease.noted_as);
        place.is_some_and(|place| on(&place) == Some(lease))
    }

    /// Returns the volume's size.
    pub fn capacity(&self) -> Bytes {
        self.config.capacity
    }

    /// Returns the number of threads that the volume was made for.
    pub fn workers(&self) -> usize {
        self.config.workers
    }

    /// Returns the worker below [`workers`](Self::workers) that shares its connections with this.
    pub(crate) fn worker(&self, worker: WorkerId) -> WorkerId {
        WorkerId(worker.0 % self.config.workers)
    }

    /// Writes the data. An extent is placed at its first write, and moves if its lender is full.
    ///
    /// # Errors
    /// [`VolumeError`]; any part may then have been written.
    pub fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), VolumeError> {
        self.check(offset, data.len() as u64)?;
        let worker = self.worker(worker);
        let mut rest = data;
        for (index, bytes) in pieces(offset, data.len() as u64) {
            let (now, later) = rest.split_at((bytes.end - bytes.start) as usize);
            self.write_piece(worker, index, bytes.start, now)?;
            rest = later;
        }
        self.counters.written(data.len());
        Ok(())
    }

    /// Writes runs in ascending order, and keeps those to one extent in flight together. So a slow
    /// step happens once for many runs. Allocates.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_many(&self, worker: WorkerId, runs: &[Piece<'_>]) -> Result<(), VolumeError> {
        let worker = self.worker(worker);
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
                // The extent has no place, or its lender is full or away: `write_piece` handles
                // each case.
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
        worker: WorkerId,
        index: usize,
        at: u64,
        data: &[u8],
    ) -> Result<(), VolumeError> {
        let mut relocations = 0;
        loop {
            match self.extents[index].write(worker, at, data) {
                Ok(()) => return Ok(()),
                Err(Fault::Nowhere) => self.place(worker, index)?,
                Err(Fault::Holder(lease, error @ HolderError::Full(_)))
                    if relocations < MOST_RELOCATIONS =>
                {
                    relocations += 1;
                    // If there is no room elsewhere, the lender's error says more.
                    if self.relocate(index, &lease, Destinations::All).is_err() {
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
    fn place(&self, worker: WorkerId, index: usize) -> Result<(), VolumeError> {
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

    /// Makes the range read as zeroes and frees its room at the lenders. Extents that hold nothing
    /// any more give back their place.
    ///
    /// # Errors
    /// [`VolumeError`]; any part may then have been discarded.
    pub fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), VolumeError> {
        self.check(offset, length)?;
        let worker = self.worker(worker);
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

    /// Makes the range read as zeroes. The same as [`discard`](Self::discard), and as cheap.
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    pub fn write_zeroes(
        &self,
        worker: WorkerId,
        offset: u64,
        length: u64,
    ) -> Result<(), VolumeError> {
        self.discard(worker, offset, length)
    }

    /// Makes acknowledged writes permanent, where lenders have storage more permanent than their
    /// RAM.
    ///
    /// # Errors
    /// [`VolumeError`], of the first lender that failed.
    pub fn flush(&self, worker: WorkerId) -> Result<(), VolumeError> {
        let worker = self.worker(worker);
        let mut at = 0;
        // Does not hold the list's lock, because a flush may take long.
        while let Some(lease) = { self.leases.list().get(at).cloned() } {
            at += 1;
            lease.holder.flush(worker).map_err(|error| self.holder_error(0, 0, &lease, error))?;
        }
        Ok(())
    }

    /// Returns the state of the volume. First probes unreachable lenders, which takes about a
    /// second for each that stays away.
    pub fn status(&self) -> VolumeStatus {
        // Does not hold the list's lock, because probes take time.
        let leases: Vec<_> = self.leases.list().clone();
        leases.iter().for_each(|lease| lease.holder.probe());
        self.note_lenders_back(&leases);
        self.known_status()
    }

    /// Returns the state as far as it is known, without waiting for lenders. It suits a volume
    /// under [`Upkeep`](crate::Upkeep), which probes lost lenders.
    pub fn known_status(&self) -> VolumeStatus {
        let leases: Vec<_> = self.leases.list().clone();
        let states = leases.iter().filter_map(|lease| lease_status(lease)).collect();
        let (errors, failed_reads, last_error) = self.counters.errors();
        let spill = self.leases.spill();
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

    /// Returns the volume's leases.
    pub fn targets(&self) -> Vec<LeaseTarget> {
        self.leases.list().iter().filter_map(|lease| lease.target.clone()).collect()
    }

    /// Returns the remembered events with a higher number, without asking a lender.
    pub fn events_after(&self, number: u64) -> Vec<Event> {
        self.events.after(number)
    }

    pub(crate) fn check(&self, offset: u64, length: u64) -> Result<(), VolumeError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.config.capacity.0) {
            return Ok(());
        }
        Err(VolumeError::OutOfRange {
            volume: self.id(),
            offset,
            length,
            capacity: self.config.capacity,
        })
    }

    /// Records that the owner has moved to this host for good. Before a lender serves this volume
    /// again, it ends the connections of earlier hosts and refuses new ones.
    pub fn end_older_generations(&self) {
        self.leases.list().iter().for_each(|lease| lease.holder.end_older());
    }

    /// Probes lost lenders. Returns whether no lender is lost.
    pub(crate) fn try_lost_lenders(&self) -> bool {
        let leases: Vec<_> = self.leases.list().clone();
        // Probes all of them, even after one that does not answer.
        leases.iter().filter(|lease| lease.is_away()).for_each(|lease| lease.holder.probe());
        self.note_lenders_back(&leases)
    }

    /// Reports the lost lenders that answer again. Returns whether no lender is lost.
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
        // Counts instead of stopping at the first, so that each lender that is back is reported.
        let away = leases.iter().filter(|lease| !is_back(lease)).count();
        away == 0
    }

    /// Reads a piece of one extent.
    pub(crate) fn read_piece(
        &self,
        worker: WorkerId,
        index: usize,
        at: u64,
        into: &mut [u8],
    ) -> Result<(), VolumeError> {
        self.extents[index].read(worker, at, into).map_err(|Failed(lease, error)| {
            let error = self.holder_error(index, at, &lease, error);
            self.lost_page(&lease, &error);
            error
        })
    }

    /// Counts a failed read, and reports a lost page once for each loss of a lender.
    fn lost_page(&self, lease: &Lease, error: &VolumeError) {
        self.counters.failed_read();
        let VolumeError::Holder { page, place, source, .. } = error else { return };
        if !lease.lost_page.swap(true, Ordering::Relaxed) {
            let (place, why) = (place.clone(), source.to_string());
            self.events.happened(Happening::PageLost { page: *page, place, why });
        }
    }

    /// Reports that spilling starts, before an extent is in the spill file.
    pub(crate) fn spills(&self) {
        if !self.counters.spills.swap(true, Ordering::Relaxed) {
            self.events.happened(Happening::SpillStarted);
        }
    }

    /// Returns whether extents are in the spill file, and reports when spilling has ended.
    pub(crate) fn is_spilling(&self) -> bool {
        let is = self.leases.spill().is_some_and(|spill| spill.taken() > 0);
        if !is && self.counters.spills.swap(false, Ordering::Relaxed) {
            self.events.happened(Happening::SpillEnded);
        }
        is
    }

    /// Tells the ledger, if there is one.
    pub(crate) fn note(&self, extent: usize, place: Option<(LeaseId, u32)>) {
        if let Some(ledger) = &self.config.ledger {
            ledger.note(ExtentIndex(extent as u64), place);
        }
    }

    /// Returns the number of all workers: those for I/O, and one for threads that move extents or
    /// see to the volume. There may be more such threads: each takes a connection that is free. Own
    /// connections would cost a lender one more for each of its leases.
    pub(crate) fn all_workers(&self) -> usize {
        self.config.workers + 1
    }

    /// Returns the worker for moves and upkeep.
    pub(crate) fn mover_worker(&self) -> WorkerId {
        WorkerId(self.config.workers)
    }

    pub(crate) fn no_room(&self) -> VolumeError {
        self.failed(None, VolumeError::NoRoom(self.id()))
    }

    /// Records and returns the error. The status shows it until its lease answers again.
    pub(crate) fn failed(&self, lease: Option<LeaseId>, error: VolumeError) -> VolumeError {
        self.counters.failed(error.to_string(), lease);
        error
    }

    /// Returns the error with all that is known about its place, and reports a lost lender.
    pub(crate) fn holder_error(
        &self,
        extent: usize,
        at: u64,
        lease: &Lease,
        source: HolderError,
    ) -> VolumeError {
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
            VolumeError::Holder { volume: self.id(), page, place: lease.to_string(), source },
        )
    }
}

/// Cuts the range at extents: yields each extent's index, and the bytes within it.
pub(crate) fn pieces(offset: u64, length: u64) -> impl Iterator<Item = (usize, Range<u64>)> {
    let end = offset + length;
    let mut at = offset;
    iter::from_fn(move || {
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
