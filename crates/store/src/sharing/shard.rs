//! A shard of a group's index and free frames.

use std::sync::atomic::Ordering;

use hashbrown::HashTable;

use super::batch::{BATCH, Batch};
use crate::sys::{Blank, FrameFile, HOLE};

/// The most free frames with RAM that a shard keeps for the next writes. With two batches, a call
/// into the kernel leaves the shard as far as possible from the next call.
const WARM: usize = 2 * BATCH;

/// A part of a group's index, by fingerprint, and of its free frames. A thread that holds a shard's
/// lock holds no other locks than those of pages, and does not sleep.
#[derive(Debug)]
pub(super) struct Shard {
    /// Frames by the fingerprint in their metadata; no two of them have the same.
    index: HashTable<u32>,
    /// Free frames with RAM.
    warm: Vec<Blank>,
    /// The first of the free frames without RAM, a list linked through their metadata; [`HOLE`] if
    /// it is empty.
    cold: u32,
}

impl Default for Shard {
    fn default() -> Self {
        Self { index: HashTable::new(), warm: Vec::with_capacity(WARM + BATCH), cold: HOLE }
    }
}

impl Shard {
    /// Returns the indexed frame with this fingerprint.
    pub(super) fn find(&self, file: &FrameFile, fingerprint: u64) -> Option<u32> {
        let same = |&frame: &u32| fingerprint_of(file, frame) == fingerprint;
        self.index.find(fingerprint, same).copied()
    }

    /// Adds a frame; no other in the index may have its fingerprint.
    pub(super) fn insert(&mut self, file: &FrameFile, frame: u32) {
        self.index.insert_unique(fingerprint_of(file, frame), frame, |&frame| {
            fingerprint_of(file, frame)
        });
    }

    /// Takes a frame out of the index; a frame that is not in it is no error.
    pub(super) fn remove(&mut self, file: &FrameFile, frame: u32) {
        if let Ok(found) =
            self.index.find_entry(fingerprint_of(file, frame), |&found| found == frame)
        {
            found.remove();
        }
    }

    /// Returns the number of free frames with RAM.
    pub(super) fn warm(&self) -> usize {
        self.warm.len()
    }

    pub(super) fn take_warm(&mut self) -> Option<Blank> {
        self.warm.pop()
    }

    pub(super) fn put_warm(&mut self, blank: Blank) {
        self.warm.push(blank);
    }

    /// Takes a batch of free frames with RAM if there are more than [`WARM`].
    pub(super) fn take_surplus(&mut self) -> Batch {
        if self.warm.len() > WARM { self.take_warm_batch() } else { Batch::default() }
    }

    /// Takes up to a batch of free frames with RAM.
    pub(super) fn take_warm_batch(&mut self) -> Batch {
        let mut batch = Batch::default();
        while batch.len() < BATCH
            && let Some(blank) = self.warm.pop()
        {
            batch.push(blank.0);
        }
        batch
    }

    /// Takes at most `many` free frames without RAM.
    pub(super) fn take_cold(&mut self, file: &FrameFile, many: usize) -> Batch {
        let mut batch = Batch::default();
        while batch.len() < many && self.cold != HOLE {
            batch.push(self.cold);
            self.cold = file.meta(self.cold).next.load(Ordering::Relaxed);
        }
        batch
    }

    pub(super) fn put_cold(&mut self, file: &FrameFile, frame: u32) {
        file.meta(frame).next.store(self.cold, Ordering::Relaxed);
        self.cold = frame;
    }

    /// Frees the index's spare capacity.
    pub(super) fn shrink(&mut self, file: &FrameFile) {
        self.index.shrink_to_fit(|&frame| fingerprint_of(file, frame));
    }

    /// Calls `indexed` with each frame of the index, then `free` with each free frame and whether
    /// it has RAM.
    pub(super) fn visit(
        &self,
        file: &FrameFile,
        mut indexed: impl FnMut(u32),
        mut free: impl FnMut(u32, bool),
    ) {
        self.index.iter().for_each(|&frame| indexed(frame));
        self.warm.iter().for_each(|blank| free(blank.0, true));
        let mut cold = self.cold;
        while cold != HOLE {
            free(cold, false);
            cold = file.meta(cold).next.load(Ordering::Relaxed);
        }
    }
}

fn fingerprint_of(file: &FrameFile, frame: u32) -> u64 {
    file.meta(frame).fingerprint.load(Ordering::Relaxed)
}
