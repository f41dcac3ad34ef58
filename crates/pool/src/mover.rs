//! Moving extents between holders while they are read and written.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, HostName, LeaseId, PAGE_SIZE, is_zero};
use serde::{Deserialize, Serialize};

use crate::error::PoolError;
use crate::extent::{Extent, Move, Place};
use crate::holder::{HolderError, Piece};
use crate::lease::{Lease, Slot};
use crate::lock;
use crate::placement::lease_id;
use crate::volume::Volume;

/// How much is copied while I/O on the extent waits: 4 ms at 1 Gb/s.
const CHUNK: u64 = 512 << 10;
/// How long a move at leisure rests after each piece, at least and at most.
const REST: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));
const PAGE: u64 = PAGE_SIZE as u64;
const PAGES_PER_CHUNK: usize = (CHUNK / PAGE) as usize;

/// How far an evacuation is, in extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Extents that have moved.
    pub moved: u64,
    /// Extents that had to, when it began.
    pub total: u64,
    /// What is still to be moved: pages that hold something.
    #[serde(default)]
    pub left: Bytes,
}

/// What came of an evacuation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evacuated {
    /// Where the extents went, to leases.
    pub to: Vec<Moved>,
    /// What went to the spill file: pages that hold something.
    pub spilled: Bytes,
}

/// What one lease took in an evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The lease.
    pub lease: LeaseId,
    /// Whose it is.
    pub lender: HostName,
    /// How many extents it took.
    pub extents: u64,
    /// The pages in them that hold something.
    pub bytes: Bytes,
}

/// What copying ended with, other than well.
enum Halt {
    /// The source failed: there is nowhere else to copy from.
    Source(HolderError),
    /// The destination failed: there may be others.
    Destination(Option<HolderError>),
}

impl Volume {
    /// Moves all extents of a lease to other leases with room, else to the spill file, while I/O goes on; then closes the
    /// connections to it, and it is no part of the volume any more. New extents are not placed on it meanwhile.
    ///
    /// `progress` is told after each extent. Several leases may be evacuated at a time, by different threads.
    ///
    /// # Errors
    /// When the lender fails, or there is no room for what it holds. Nothing is lost: what has moved stays moved, the
    /// rest stays, and the lease is in use again.
    pub fn evacuate(
        &self,
        lease: LeaseId,
        mut progress: impl FnMut(Progress),
    ) -> Result<Evacuated, PoolError> {
        let unknown = || PoolError::UnknownLease(self.id(), lease);
        let source = self.leases.find(lease).ok_or_else(unknown)?;
        if !source.set_open(false) {
            return Err(PoolError::Evacuating(self.id(), lease));
        }
        // A move that is under way may have taken a slot of it before it was closed.
        drop(self.mover());
        let result = self.empty(&source, &mut progress);
        match &result {
            Ok(_) => {
                self.leases.list_mut().retain(|other| !Arc::ptr_eq(other, &source));
                source.holder.close();
            }
            Err(_) => {
                source.set_open(true);
            }
        }
        result
    }

    /// How far the evacuation of a lease is; nothing where none is under way.
    pub fn evacuating(&self, lease: LeaseId) -> Option<Progress> {
        let source = self.leases.find(lease).filter(|source| !source.is_open())?;
        let (total, moved) = &source.leaving;
        let (total, moved) = (total.load(Ordering::Relaxed), moved.load(Ordering::Relaxed));
        Some(Progress { moved, total, left: self.held_by(&source) })
    }

    /// What a lease holds: the pages that were written and not discarded since.
    pub(crate) fn held_by(&self, lease: &Arc<Lease>) -> Bytes {
        let here = self.extents.iter().filter(|extent| extent.is_on(lease));
        Bytes(here.map(|extent| extent.written.count()).sum::<u64>() * PAGE)
    }

    fn empty(
        &self,
        source: &Arc<Lease>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Evacuated, PoolError> {
        let total = source.taken();
        let (of, done) = &source.leaving;
        of.store(total, Ordering::Relaxed);
        done.store(0, Ordering::Relaxed);
        let mut evacuated = Evacuated::default();
        // Once through is enough: slots are not given out any more, no move is under way to it, and whoever took one
        // before holds the extent's lock until the extent is there to be found.
        for index in 0..self.extents.len() {
            if !self.extents[index].is_on(source) {
                continue;
            }
            if let Some((destination, bytes)) = self.relocate(index, source)? {
                evacuated.add(&destination, bytes);
            }
            let moved = done.fetch_add(1, Ordering::Relaxed) + 1;
            progress(Progress { moved, total: total.max(moved), left: self.held_by(source) });
        }
        match source.taken() {
            0 => Ok(evacuated),
            // A lease that is given up takes what is on it along.
            extents => Err(self.failed(
                lease_id(source),
                PoolError::StillUsed { volume: self.id(), lease: source.to_string(), extents },
            )),
        }
    }

    /// Moves one extent off a lease. Returns where it went and how much it held; nothing if it was not there any more, or holds
    /// nothing any more.
    pub(crate) fn relocate(
        &self,
        index: usize,
        source: &Arc<Lease>,
    ) -> Result<Option<(Arc<Lease>, Bytes)>, PoolError> {
        let mut buffer = self.mover();
        let mut tried = vec![source.clone()];
        let mut last = None;
        loop {
            let to = match self.leases.take(self.mover_worker(), &mut tried) {
                Ok(Some(to)) => to,
                Ok(None) => return Err(last.unwrap_or_else(|| self.no_room())),
                Err((lease, error)) => return Err(self.holder_error(index, 0, &lease, error)),
            };
            match self.transfer(index, source, &to, &mut buffer, || true) {
                Ok(bytes) => {
                    if to.lease.target.is_none() && bytes > Bytes::ZERO {
                        self.spills();
                    }
                    return Ok((bytes > Bytes::ZERO).then_some((to.lease, bytes)));
                }
                Err(Halt::Source(error)) => return Err(self.holder_error(index, 0, source, error)),
                Err(Halt::Destination(error)) => {
                    last =
                        error.map(|error| self.holder_error(index, 0, &to.lease, error)).or(last);
                    tried.push(to.lease);
                }
            }
        }
    }

    /// Waits until nothing else moves; what moves at leisure stops for that.
    fn mover(&self) -> MutexGuard<'_, Box<[u8]>> {
        self.hurried.fetch_add(1, Ordering::Relaxed);
        let buffer = lock(&self.mover_buffer);
        self.hurried.fetch_sub(1, Ordering::Relaxed);
        buffer
    }

    /// Moves one extent from the spill file to `lease`, at leisure: half of the time it does nothing, and it stops where another
    /// extent must move at once. Whether one has moved.
    ///
    /// # Errors
    /// Where the lender or the file fails; the extent is where it was.
    pub(crate) fn bring_back(&self, lease: &Arc<Lease>) -> Result<bool, PoolError> {
        let Some(spill) = &self.leases.spill else { return Ok(false) };
        let Some(index) = self.extents.iter().position(|extent| extent.is_on(spill)) else {
            return Ok(false);
        };
        let Ok(mut buffer) = self.mover_buffer.try_lock() else { return Ok(false) };
        let taken = lease.take(self.mover_worker());
        let Some(to) = taken.map_err(|error| self.holder_error(index, 0, lease, error))? else {
            return Ok(false);
        };
        let mut begun = Instant::now();
        let go_on = || {
            thread::sleep(begun.elapsed().clamp(REST.0, REST.1));
            begun = Instant::now();
            self.hurried.load(Ordering::Relaxed) == 0
        };
        match self.transfer(index, spill, &to, &mut buffer, go_on) {
            Ok(bytes) => Ok(bytes > Bytes::ZERO),
            Err(Halt::Destination(None)) => Ok(false),
            Err(Halt::Destination(Some(error))) => Err(self.holder_error(index, 0, lease, error)),
            Err(Halt::Source(error)) => Err(self.holder_error(index, 0, spill, error)),
        }
    }

    /// Moves one extent from `source` to a slot, unless it is not there any more; the slot that is not used is given back. Asks
    /// after each piece whether to go on. Returns how much it held.
    fn transfer(
        &self,
        index: usize,
        source: &Arc<Lease>,
        to: &Slot,
        buffer: &mut [u8],
        go_on: impl FnMut() -> bool,
    ) -> Result<Bytes, Halt> {
        let (worker, extent) = (self.mover_worker(), &self.extents[index]);
        let Some(from) = begin(extent, source, to) else {
            to.give_back(true);
            return Ok(Bytes::ZERO);
        };
        let done = copy(extent, worker, buffer, go_on)
            .and_then(|()| finish(extent, |to| self.note(index, to.and_then(Slot::place))));
        let unused = if done.is_ok() {
            &from
        } else {
            call_off(extent);
            extent.free(|| self.note(index, None));
            to
        };
        let clean = unused.discard(worker, 0, EXTENT_SIZE).is_ok();
        unused.give_back(clean);
        done
    }
}

impl Evacuated {
    fn add(&mut self, destination: &Lease, bytes: Bytes) {
        let Some(target) = &destination.target else {
            self.spilled += bytes;
            return;
        };
        let known = self.to.iter_mut().find(|moved| moved.lease == target.lease);
        match known {
            Some(moved) => {
                moved.extents += 1;
                moved.bytes += bytes;
            }
            None => {
                let (lease, lender) = (target.lease, target.lender.clone());
                self.to.push(Moved { lease, lender, extents: 1, bytes });
            }
        }
    }
}

/// Starts the move, if the extent is still on `source`. Returns the slot that it leaves.
fn begin(extent: &Extent, source: &Arc<Lease>, to: &Slot) -> Option<Slot> {
    let mut place = extent.alone();
    let Place::At(from) = &*place else { return None };
    if !Arc::ptr_eq(&from.lease, source) {
        return None;
    }
    let from = from.clone();
    *place = Place::Moving(Move::new(from.clone(), to.clone()));
    Some(from)
}

/// Ends the move where it led, after `note` was told: nowhere, if the extent was emptied meanwhile. Returns how much it holds.
fn finish(extent: &Extent, note: impl FnOnce(Option<&Slot>)) -> Result<Bytes, Halt> {
    let mut place = extent.alone();
    match &*place {
        Place::Moving(moving) if moving.copied == EXTENT_SIZE && !moving.is_abandoned() => {
            let (to, holds) = (moving.to.clone(), extent.written.count());
            note((holds > 0).then_some(&to));
            *place = if holds > 0 {
                Place::At(to)
            } else {
                to.give_back(true);
                Place::Nowhere
            };
            Ok(Bytes(holds * PAGE))
        }
        _ => Err(Halt::Destination(None)),
    }
}

/// Ends the move where it began.
fn call_off(extent: &Extent) {
    let mut place = extent.alone();
    if let Place::Moving(moving) = &*place {
        let from = moving.from.clone();
        *place = Place::At(from);
    }
}

/// Copies the extent piece by piece, letting I/O in between.
fn copy(
    extent: &Extent,
    worker: usize,
    buffer: &mut [u8],
    mut go_on: impl FnMut() -> bool,
) -> Result<(), Halt> {
    loop {
        let mut place = extent.alone();
        let Place::Moving(moving) = &mut *place else { return Err(Halt::Destination(None)) };
        if moving.is_abandoned() {
            return Err(Halt::Destination(None));
        }
        // What was never written, and what was discarded since, is in neither place: nothing to copy.
        let rest = extent.written.trim(&(moving.copied..EXTENT_SIZE));
        if rest.is_empty() {
            moving.copied = EXTENT_SIZE;
            return Ok(());
        }
        let chunk = rest.start..(rest.start + CHUNK).min(rest.end);
        copy_chunk(extent, moving, worker, &chunk, buffer)?;
        moving.copied = chunk.end;
        drop(place);
        if !go_on() {
            return Err(Halt::Destination(None));
        }
    }
}

fn copy_chunk(
    extent: &Extent,
    moving: &Move,
    worker: usize,
    chunk: &Range<u64>,
    buffer: &mut [u8],
) -> Result<(), Halt> {
    let data = &mut buffer[..(chunk.end - chunk.start) as usize];
    moving.from.read(worker, chunk.start, data).map_err(Halt::Source)?;
    extent.check_read(&moving.from, chunk.start, data).map_err(Halt::Source)?;
    let mut pieces: [Piece<'_>; PAGES_PER_CHUNK] = [(0, &[]); PAGES_PER_CHUNK];
    let mut used = 0;
    let holds = |page: &[u8], number: u64| extent.written.is_set(number) && !is_zero(page);
    let mut start = 0;
    // The new lender is to store only what there is: runs of pages that hold something, in between nothing.
    for (at, page) in data.chunks(PAGE_SIZE).enumerate() {
        let at = at * PAGE_SIZE;
        if !holds(page, (chunk.start + at as u64) / PAGE) {
            start = at + page.len();
            continue;
        }
        let next = at + page.len();
        let goes_on = data.get(next..data.len().min(next + PAGE_SIZE)).is_some_and(|page| {
            !page.is_empty() && holds(page, (chunk.start + next as u64) / PAGE)
        });
        if !goes_on {
            pieces[used] = (chunk.start + start as u64, &data[start..next]);
            used += 1;
            start = next;
        }
    }
    moving
        .to
        .write_many(worker, &mut pieces[..used])
        .map_err(|error| Halt::Destination(Some(error)))
}

/// The buffer that a move needs.
pub(crate) fn buffer() -> Box<[u8]> {
    vec![0; CHUNK as usize].into_boxed_slice()
}
