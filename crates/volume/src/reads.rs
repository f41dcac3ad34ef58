//! Reads of a volume.

use std::mem;
use std::sync::{Arc, RwLockReadGuard};

use aquifer_page::{EXTENT_SIZE, WorkerId};

use crate::error::VolumeError;
use crate::extent::Place;
use crate::holder::{Holder as _, PieceMut};
use crate::lease::Lease;
use crate::volume::{Volume, pieces};

/// A piece of an extent, and the extent's index.
type Part<'a> = (usize, PieceMut<'a>);

impl Volume {
    /// Fills the buffer. Bytes that were never written, or were discarded, are zeroes without any
    /// request.
    ///
    /// # Errors
    /// [`VolumeError`]; the buffer's contents are then unspecified.
    pub fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), VolumeError> {
        self.check(offset, into.len() as u64)?;
        let worker = self.worker(worker);
        let mut rest = &mut *into;
        for (index, bytes) in pieces(offset, rest.len() as u64) {
            let (now, later) = rest.split_at_mut((bytes.end - bytes.start) as usize);
            rest = later;
            self.read_piece(worker, index, bytes.start, now)?;
        }
        self.counters.read(into.len());
        Ok(())
    }

    /// Fills many buffers, with the reads from one lease in flight together. Allocates.
    ///
    /// # Errors
    /// As [`read`](Self::read), for all buffers.
    pub fn read_many(
        &self,
        worker: WorkerId,
        runs: &mut [PieceMut<'_>],
    ) -> Result<(), VolumeError> {
        if let [(offset, into)] = runs {
            return self.read(worker, *offset, into);
        }
        let worker = self.worker(worker);
        let mut parts = Vec::with_capacity(runs.len());
        let mut bytes = 0;
        for (offset, into) in runs {
            self.check(*offset, into.len() as u64)?;
            bytes += into.len();
            let mut rest = &mut **into;
            for (index, within) in pieces(*offset, rest.len() as u64) {
                let (now, later) = rest.split_at_mut((within.end - within.start) as usize);
                rest = later;
                parts.push((index, (within.start, now)));
            }
        }
        while !parts.is_empty() {
            parts = self.read_some(worker, parts)?;
        }
        self.counters.read(bytes);
        Ok(())
    }

    /// Reads the first of these pieces, and all others that the same lease has. Returns the rest.
    fn read_some<'a>(
        &self,
        worker: WorkerId,
        mut parts: Vec<Part<'a>>,
    ) -> Result<Vec<Part<'a>>, VolumeError> {
        let mut places: Vec<(usize, RwLockReadGuard<'_, Place>)> = Vec::new();
        let (mut indices, mut pieces, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        let mut lease: Option<Arc<Lease>> = None;
        for (index, (at, into)) in parts.drain(..) {
            let bytes = at..at + into.len() as u64;
            let is_stored = self.extents[index].written.trim(&bytes) == bytes;
            if places.iter().all(|(held, _)| *held != index) {
                // Does not wait: a thread that has this place may wait for another one of these.
                places.extend(self.extents[index].try_shared().map(|place| (index, place)));
            }
            let place = places.iter().find(|(held, _)| *held == index);
            let slot = place.and_then(|(_, place)| place.slot()).filter(|_| is_stored);
            match slot {
                Some(slot) if Arc::ptr_eq(lease.get_or_insert(slot.lease.clone()), &slot.lease) => {
                    indices.push(index);
                    pieces.push((slot.will_read(at), into));
                }
                _ => {
                    places.pop_if(|(held, _)| *held == index && !indices.contains(&index));
                    rest.push((index, (at, into)));
                }
            }
        }
        let read = lease.map(|lease| lease.holder.read_many(worker, &mut pieces));
        drop(places);
        let one_by_one = match read {
            Some(Ok(())) => return Ok(rest),
            // So that the error names the page.
            Some(Err(_)) => {
                let pieces = pieces.into_iter().map(|(at, into)| (at % EXTENT_SIZE, into));
                indices.into_iter().zip(pieces).collect()
            }
            None => mem::take(&mut rest),
        };
        for (index, (at, into)) in one_by_one {
            self.read_piece(worker, index, at, into)?;
        }
        Ok(rest)
    }

    /// Returns whether one lease holds the bytes at both offsets, so that
    /// [`read_many`](Self::read_many) has reads of both in flight together. Does not wait.
    pub fn is_together(&self, one: u64, other: u64) -> bool {
        let both = self.lease_at(one).zip(self.lease_at(other));
        both.is_some_and(|(one, other)| Arc::ptr_eq(&one, &other))
    }

    /// Returns whether two lenders have the bytes at this offset, so that a read by itself asks the
    /// second if the first is late. Does not wait.
    pub fn has_a_choice(&self, at: u64) -> bool {
        self.lease_at(at).is_some_and(|lease| lease.holder.has_a_choice())
    }

    fn lease_at(&self, at: u64) -> Option<Arc<Lease>> {
        let place = self.extents.get((at / EXTENT_SIZE) as usize)?.try_shared()?;
        Some(place.slot()?.lease.clone())
    }
}
