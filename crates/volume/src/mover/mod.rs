//! Moves of extents between holders during I/O on them.

mod copy;
mod movers;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, HostName, LeaseId, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use crate::error::VolumeError;
use crate::holder::Holder as _;
use crate::lease::{Lease, Slot};
use crate::lock;
use crate::placement::lease_id;
use crate::volume::Volume;

pub(crate) use copy::buffer;
use copy::{Halt, begin, call_off, copy, finish};
use movers::MOVERS;
pub(crate) use movers::Movers;

/// The interval between reports of an evacuation that another caller requested.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);
/// The pause of a background move after each piece: shortest and longest.
pub(crate) const REST: (Duration, Duration) =
    (Duration::from_millis(2), Duration::from_millis(100));
/// The stack of a thread that moves extents.
const STACK: usize = 256 << 10;
const PAGE: u64 = PAGE_SIZE as u64;

/// The progress of an evacuation, in extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The number of extents moved.
    pub moved: u64,
    /// The number of extents to move, when the evacuation began.
    pub total: u64,
    /// The pages still to move that hold data, in bytes.
    #[serde(default)]
    pub left: Bytes,
}

/// The result of an evacuation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evacuated {
    /// The extents that went to other leases, by lease.
    pub to: Vec<Moved>,
    /// The pages that hold data and went to the spill file, in bytes.
    pub spilled: Bytes,
}

/// The extents that one lease took in an evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The lease.
    pub lease: LeaseId,
    /// The lease's lender.
    pub lender: HostName,
    /// The number of extents that the lease took.
    pub extents: u64,
    /// The pages in them that hold data, in bytes.
    pub bytes: Bytes,
}

/// Where an extent may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destinations {
    /// To another lease, or else to the spill file.
    All,
    /// To another lease.
    Lenders,
}

impl Volume {
    /// Moves all extents of a lease to other leases with room, or else to the spill file, while I/O
    /// goes on. Then it closes the connections and removes the lease from the volume. Meanwhile the
    /// lease takes no new extents.
    ///
    /// Several extents move at a time, and the function calls `progress` after some of them and at
    /// the end. Several threads may evacuate a lease each at the same time.
    ///
    /// # Errors
    /// [`VolumeError::UnknownLease`] and [`VolumeError::Evacuating`]. Otherwise when the lender
    /// fails, or no other lease has room, or the volume is [held still](Self::hold_still). No data
    /// is lost: moved extents stay moved, the others stay, and the lease is in use again.
    pub fn evacuate(
        &self,
        lease: LeaseId,
        progress: impl FnMut(Progress),
    ) -> Result<Evacuated, VolumeError> {
        self.evacuate_to(Destinations::All, lease, progress)
    }

    fn evacuate_to(
        &self,
        to: Destinations,
        lease: LeaseId,
        progress: impl FnMut(Progress),
    ) -> Result<Evacuated, VolumeError> {
        self.vacate((lease, to), || Ok(()), progress, |source| self.remove(source, false))
    }

    /// Moves as many extents off a lease as other leases have room for, which relieves its lender.
    /// The lease stays, and is in use again. Does nothing for a lease that is unknown or leaves.
    ///
    /// # Errors
    /// When a lender fails, or the volume is [held still](Self::hold_still).
    pub fn relieve(
        &self,
        lease: LeaseId,
        progress: impl FnMut(Progress),
    ) -> Result<(), VolumeError> {
        let leases: Vec<_> = self.leases.list().clone();
        let others = leases.iter().filter(|other| lease_id(other) != Some(lease));
        if others.map(|other| other.free()).sum::<u64>() == 0 {
            return Ok(());
        }
        let stay = |_: &Arc<Lease>| Err(VolumeError::NoRoom(self.id()));
        match self.vacate((lease, Destinations::Lenders), || Ok(()), progress, stay) {
            Err(
                VolumeError::NoRoom(_)
                | VolumeError::Evacuating(..)
                | VolumeError::UnknownLease(..),
            ) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Removes a lease as [`evacuate`](Self::evacuate) does, even if the volume has no other. First
    /// calls `discard`, which discards the pages that the lease holds. Meanwhile the lease takes no
    /// new extents.
    ///
    /// # Errors
    /// Those of `discard`, or as [`evacuate`](Self::evacuate).
    pub fn give_up<E: From<VolumeError>>(
        &self,
        lease: LeaseId,
        discard: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let end = |source: &Arc<Lease>| self.remove(source, true);
        self.vacate((lease, Destinations::All), discard, |_| (), end).map(drop)
    }

    fn vacate<E: From<VolumeError>>(
        &self,
        (lease, to): (LeaseId, Destinations),
        discard: impl FnOnce() -> Result<(), E>,
        mut progress: impl FnMut(Progress),
        end: impl FnOnce(&Arc<Lease>) -> Result<(), VolumeError>,
    ) -> Result<Evacuated, E> {
        let unknown = || VolumeError::UnknownLease(self.id(), lease);
        let source = self.leases.find(lease).ok_or_else(unknown)?;
        if !source.set_open(false) {
            return Err(VolumeError::Evacuating(self.id(), lease).into());
        }
        // Waits for the moves in flight, which may have taken slots of the lease before it was
        // closed.
        drop(self.movers.alone());
        let result = discard().and_then(|()| {
            let done = self.empty(&source, to, &mut progress)?;
            end(&source)?;
            Ok(done)
        });
        if result.is_err() {
            source.set_open(true);
        }
        result
    }

    /// Discards what an empty lease may still hold, and removes the lease. Without it the volume
    /// must have another lease or a spill file, unless the caller says that somebody adds one.
    fn remove(&self, source: &Arc<Lease>, may_be_last: bool) -> Result<(), VolumeError> {
        loop {
            // Held for one slot at a time, as writes may wait for the mover.
            let _mover = self.movers.alone();
            if self.is_held() {
                return Err(VolumeError::Held(self.id()));
            }
            if source.discard_leftover(self.mover_worker()) {
                continue;
            }
            let _disk = self.hold_disk_copies();
            let mut leases = self.leases.list_mut();
            if leases.len() == 1 && self.leases.spill().is_none() && !may_be_last {
                return Err(self.no_room());
            }
            leases.retain(|other| !Arc::ptr_eq(other, source));
            self.forget_all_tags(source);
            drop(leases);
            if let Some(second) = source.holder.second()
                && !self.remove_disk_copy(&second)
            {
                // It may have missed discards.
                self.discard_copy(&second, source.total);
            }
            source.holder.close();
            return Ok(());
        }
    }

    /// Forgets the tags of a lease that leaves the list. The caller has the list locked, as the
    /// lease may come back with other pages.
    fn forget_all_tags(&self, lease: &Lease) {
        let second = lease.holder.second();
        let second = second.as_ref().and_then(|second| second.copy.target.as_ref());
        let all = lease.noted_as.into_iter().chain(second.map(|target| target.lease));
        all.for_each(|lease| self.forget_tags(lease));
    }

    /// Removes an unused lease from the volume, without a request to its lender.
    ///
    /// # Errors
    /// [`VolumeError::StillUsed`].
    pub fn remove_unused(&self, lease: LeaseId) -> Result<(), VolumeError> {
        let Some(unused) = self.leases.find(lease) else { return Ok(()) };
        let _disk = self.hold_disk_copies();
        let mut leases = self.leases.list_mut();
        match unused.taken() {
            0 => {
                leases.retain(|other| !Arc::ptr_eq(other, &unused));
                self.forget_all_tags(&unused);
                drop(leases);
                unused.holder.second().iter().for_each(|second| {
                    self.remove_disk_copy(second);
                });
                unused.holder.close();
                Ok(())
            }
            extents => Err(VolumeError::StillUsed {
                volume: self.id(),
                lease: unused.to_string(),
                extents,
            }),
        }
    }

    /// Evacuates a lease as [`evacuate`](Self::evacuate) does, however often callers repeat it.
    /// While another thread moves the extents, this function follows that, and takes over if it
    /// fails. A lease that the volume does not have counts as evacuated.
    ///
    /// # Errors
    /// As [`evacuate`](Self::evacuate).
    pub fn release(
        &self,
        lease: LeaseId,
        progress: impl FnMut(Progress),
    ) -> Result<(), VolumeError> {
        self.release_to(Destinations::All, lease, progress)
    }

    /// Releases a lease as [`release`](Self::release) does, but moves no extent to the spill file.
    ///
    /// # Errors
    /// As [`evacuate`](Self::evacuate).
    pub fn release_to_lenders(
        &self,
        lease: LeaseId,
        progress: impl FnMut(Progress),
    ) -> Result<(), VolumeError> {
        self.release_to(Destinations::Lenders, lease, progress)
    }

    fn release_to(
        &self,
        to: Destinations,
        lease: LeaseId,
        mut progress: impl FnMut(Progress),
    ) -> Result<(), VolumeError> {
        let Some(source) = self.leases.find(lease) else { return Ok(()) };
        // Once it is gone, a lease with this id is a new one, which stays.
        while self.leases.list().iter().any(|known| Arc::ptr_eq(known, &source)) {
            match self.evacuate_to(to, lease, &mut progress) {
                Ok(_) | Err(VolumeError::UnknownLease(..)) => return Ok(()),
                Err(VolumeError::Evacuating(..)) => {
                    while let Some(now) = self.evacuating(lease) {
                        progress(now);
                        thread::sleep(PROGRESS_PERIOD);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Keeps every extent in its place until [`let_move`](Self::let_move). Waits for the moves in
    /// flight, which it calls off. Moves fail meanwhile.
    pub fn hold_still(&self) {
        self.held.store(true, Ordering::SeqCst);
        drop(self.movers.alone());
    }

    /// Lets extents move again.
    pub fn let_move(&self) {
        self.held.store(false, Ordering::SeqCst);
    }

    fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Returns the progress of a lease's evacuation; `None` if none is in progress.
    pub fn evacuating(&self, lease: LeaseId) -> Option<Progress> {
        let source = self.leases.find(lease).filter(|source| !source.is_open())?;
        let (total, moved) = &source.leaving;
        let (total, moved) = (total.load(Ordering::Relaxed), moved.load(Ordering::Relaxed));
        Some(Progress { moved, total, left: self.held_by(&source) })
    }

    /// Returns how much a lease holds, in bytes; none for a lease that is unknown.
    pub fn held_by_lease(&self, lease: LeaseId) -> Bytes {
        self.leases.find(lease).map_or(Bytes::ZERO, |lease| self.held_by(&lease))
    }

    /// Returns how much a lease holds: the pages written and not discarded since, in bytes.
    pub(crate) fn held_by(&self, lease: &Arc<Lease>) -> Bytes {
        let here = self.extents.iter().filter(|extent| extent.is_on(lease));
        Bytes(here.map(|extent| extent.written.count()).sum::<u64>() * PAGE)
    }

    fn empty(
        &self,
        source: &Arc<Lease>,
        to: Destinations,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Evacuated, VolumeError> {
        let total = source.taken();
        let (of, done) = &source.leaving;
        of.store(total, Ordering::Relaxed);
        done.store(0, Ordering::Relaxed);
        let now = || {
            let moved = done.load(Ordering::Relaxed);
            progress(Progress { moved, total: total.max(moved), left: self.held_by(source) });
        };
        let evacuated = self.move_all(source, to, now)?;
        // A write may have moved an extent, and be about to give back its slot.
        drop(self.movers.alone());
        match source.taken() {
            0 => Ok(evacuated),
            // To give up the lease now would lose these extents.
            extents => Err(self.failed(
                lease_id(source),
                VolumeError::StillUsed { volume: self.id(), lease: source.to_string(), extents },
            )),
        }
    }

    /// Moves all extents off a lease that gives out no slots, several at a time. Calls `now` after
    /// some of them and at the end.
    fn move_all(
        &self,
        source: &Arc<Lease>,
        to: Destinations,
        mut now: impl FnMut(),
    ) -> Result<Evacuated, VolumeError> {
        // One pass is enough, as no move leads to the lease. A thread that took a slot before holds
        // the extent's lock until the extent is found there.
        let left = Mutex::new(0..self.extents.len());
        let moved = Mutex::new(Ok(Evacuated::default()));
        let move_one = || {
            let next = lock(&left).find(|index| self.extents[*index].is_on(source));
            let Some(index) = next else { return false };
            match self.relocate(index, source, to) {
                Ok(to) => {
                    source.leaving.1.fetch_add(1, Ordering::Relaxed);
                    if let (Ok(moved), Some((destination, bytes))) = (&mut *lock(&moved), to) {
                        moved.add(&destination, bytes);
                    }
                }
                Err(error) => {
                    *lock(&left) = 0..0;
                    // All movers may fail for one reason. The first error tells it.
                    let mut moved = lock(&moved);
                    if moved.is_ok() {
                        *moved = Err(error);
                    }
                }
            }
            true
        };
        thread::scope(|scope| {
            for _ in 1..MOVERS.min(source.taken() as usize) {
                let mover = thread::Builder::new().name("mover".to_owned()).stack_size(STACK);
                // Without it, this thread moves all.
                _ = mover.spawn_scoped(scope, || while move_one() {});
            }
            while move_one() {
                now();
            }
        });
        now();
        moved.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves one extent off a lease. Returns its destination and the bytes that it held; `None` if
    /// it was gone already, or holds no data any more.
    pub(crate) fn relocate(
        &self,
        index: usize,
        source: &Arc<Lease>,
        to: Destinations,
    ) -> Result<Option<(Arc<Lease>, Bytes)>, VolumeError> {
        let mut mover = self.movers.beside();
        // Another thread may move it, too, or just did: then it needs no other slot.
        let _extent = lock(&self.extents[index].mover);
        if !self.extents[index].is_on(source) {
            return Ok(None);
        }
        let mut tried = vec![source.clone()];
        if to == Destinations::Lenders {
            tried.extend(self.leases.spill().cloned());
        }
        let mut last = None;
        loop {
            if self.is_held() {
                return Err(VolumeError::Held(self.id()));
            }
            let to = match self.leases.take(self.mover_worker(), &mut tried) {
                Ok(Some(to)) => to,
                Ok(None) => return Err(last.unwrap_or_else(|| self.no_room())),
                Err((lease, error)) => return Err(self.holder_error(index, 0, &lease, error)),
            };
            match self.transfer(index, source, &to, &mut mover.buffer, || true) {
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

    /// Moves one extent from the spill file to `lease` in the background. The move pauses half of
    /// the time, and stops if another extent must move at once. Returns whether an extent has
    /// moved.
    ///
    /// # Errors
    /// When the lender or the spill file fails; the extent then stays in the spill file.
    pub(crate) fn bring_back(&self, lease: &Arc<Lease>) -> Result<bool, VolumeError> {
        let Some(spill) = self.leases.spill() else { return Ok(false) };
        let Some(index) = self.extents.iter().position(|extent| extent.is_on(spill)) else {
            return Ok(false);
        };
        let Some(mut mover) = self.movers.try_alone() else { return Ok(false) };
        if self.is_held() {
            return Ok(false);
        }
        let taken = lease.take(self.mover_worker());
        let Some(to) = taken.map_err(|error| self.holder_error(index, 0, lease, error))? else {
            return Ok(false);
        };
        let mut begun = Instant::now();
        let go_on = || {
            thread::sleep(begun.elapsed().clamp(REST.0, REST.1));
            begun = Instant::now();
            !self.movers.are_hurried()
        };
        match self.transfer(index, spill, &to, &mut mover.buffer, go_on) {
            Ok(bytes) => Ok(bytes > Bytes::ZERO),
            Err(Halt::Destination(None)) => Ok(false),
            Err(Halt::Destination(Some(error))) => Err(self.holder_error(index, 0, lease, error)),
            Err(Halt::Source(error)) => Err(self.holder_error(index, 0, spill, error)),
        }
    }

    /// Moves one extent from `source` to the slot `to`, if it is still on `source`, and gives back
    /// the unused slot. Asks `go_on` after each piece. Returns the bytes that the extent held.
    fn transfer(
        &self,
        index: usize,
        source: &Arc<Lease>,
        to: &Slot,
        buffer: &mut [u8],
        mut go_on: impl FnMut() -> bool,
    ) -> Result<Bytes, Halt> {
        let (worker, extent) = (self.mover_worker(), &self.extents[index]);
        let go_on = || !self.is_held() && go_on();
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
