use std::sync::atomic::Ordering;

use hashbrown::HashTable;

use super::batch::{BATCH, Batch};
use crate::sys::{Blank, FrameFile, HOLE};

/// The most free frames with RAM that a shard keeps for the next writes: two batches, so that after one was taken of the
/// kernel, or given back, it is as far to the next as can be.
const WARM: usize = 2 * BATCH;

/// A part of a group's index, by fingerprint, and of its free frames. Whoever has its lock holds no other but those of
/// pages, and does not wait.
#[derive(Debug)]
pub(super) struct Shard {
    /// Frames by the fingerprint that their metadata has; no two of them have the same.
    index: HashTable<u32>,
    /// Free frames with RAM.
    warm: Vec<Blank>,
    /// The first of the free frames without, which are a list through their metadata; [`HOLE`] if there
    /// is none.
    cold: u32,
}

impl Default for Shard {
    fn default() -> Self {
        Self { index: HashTable::new(), warm: Vec::with_capacity(WARM + BATCH), cold: HOLE }
    }
}

impl Shard {
    /// The frame in the index that has this fingerprint.
    pub(super) fn find(&self, file: &FrameFile, fingerprint: u64) -> Option<u32> {
        let same = |&frame: &u32| fingerprint_of(file, frame) == fingerprint;
        self.index.find(fingerprint, same).copied()
    }

    /// Adds a frame whose fingerprint no other in the index has.
    pub(super) fn insert(&mut self, file: &FrameFile, frame: u32) {
        self.index.insert_unique(fingerprint_of(file, frame), frame, |&frame| {
            fingerprint_of(file, frame)
        });
    }

    /// Takes a frame out of the index; one that had to stay out of it is no error.
    pub(super) fn remove(&mut self, file: &FrameFile, frame: u32) {
        if let Ok(found) =
            self.index.find_entry(fingerprint_of(file, frame), |&found| found == frame)
        {
            found.remove();
        }
    }

    /// How many free frames with RAM there are.
    pub(super) fn warm(&self) -> usize {
        self.warm.len()
    }

    /// Takes a free frame with RAM.
    pub(super) fn take_warm(&mut self) -> Option<Blank> {
        self.warm.pop()
    }

    /// Adds a free frame with RAM.
    pub(super) fn put_warm(&mut self, blank: Blank) {
        self.warm.push(blank);
    }

    /// Takes the free frames with RAM that are too many, if any are: a batch of them.
    pub(super) fn take_surplus(&mut self) -> Batch {
        if self.warm.len() > WARM { self.take_warm_batch() } else { Batch::default() }
    }

    /// Takes free frames with RAM, as many as fit a batch.
    pub(super) fn take_warm_batch(&mut self) -> Batch {
        let mut batch = Batch::default();
        while batch.len() < BATCH
            && let Some(blank) = self.warm.pop()
        {
            batch.push(blank.0);
        }
        batch
    }

    /// Takes free frames without RAM, at most so many.
    pub(super) fn take_cold(&mut self, file: &FrameFile, many: usize) -> Batch {
        let mut batch = Batch::default();
        while batch.len() < many && self.cold != HOLE {
            batch.push(self.cold);
            self.cold = file.meta(self.cold).next.load(Ordering::Relaxed);
        }
        batch
    }

    /// Adds a free frame without RAM.
    pub(super) fn put_cold(&mut self, file: &FrameFile, frame: u32) {
        file.meta(frame).next.store(self.cold, Ordering::Relaxed);
        self.cold = frame;
    }

    /// Gives back what the index has taken for more frames than it has now.
    pub(super) fn shrink(&mut self, file: &FrameFile) {
        self.index.shrink_to_fit(|&frame| fingerprint_of(file, frame));
    }

    /// Calls `each` with all frames of the index, and then with all free ones, and whether they have RAM.
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
