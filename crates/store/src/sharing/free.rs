//! Free frames: taking RAM for them and freeing it.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use aquifer_page::lock;

use super::batch::{BATCH, Batch};
use super::frames::GroupFrames;
use super::shard::Shard;
use crate::sys::{Blank, LOST};

/// The first frame in use. Frames below it stay free, so that batches of fresh frames begin at
/// multiples of their length and none crosses a border between extents of address space.
pub(super) const FIRST: u64 = BATCH as u64;
/// The end of the usable frames, which excludes [`LOST`].
const END: u64 = LOST as u64 / FIRST * FIRST;

impl GroupFrames {
    /// Returns a free frame with RAM, for content that belongs to `shard`.
    pub(super) fn blank(&self, shard: &Mutex<Shard>) -> io::Result<Blank> {
        if let Some(blank) = lock(shard).take_warm() {
            return Ok(blank);
        }
        // The call into the kernel is the cost, so this takes several frames at once, and a single
        // one if the tmpfs is nearly full. If that fails too, it takes a free frame of another
        // shard.
        self.populate(shard, BATCH).or_else(|_| self.populate(shard, 1)).or_else(|full| {
            self.shards.iter().find_map(|shard| lock(shard).take_warm()).ok_or(full)
        })
    }

    /// Takes RAM for up to `many` free frames; keeps all but one for later, and returns that one.
    fn populate(&self, home: &Mutex<Shard>, many: usize) -> io::Result<Blank> {
        let mut batch = lock(home).take_cold(&self.file, many);
        if batch.is_empty() {
            batch = self.take_fresh(home, many)?;
        }
        let mut first = Err(io::ErrorKind::StorageFull.into());
        for run in batch.into_runs() {
            let populated = self.file.populate(run.clone());
            let mut shard = lock(home);
            if let Err(error) = populated {
                run.for_each(|frame| shard.put_cold(&self.file, frame));
                first = first.or(Err(error));
                continue;
            }
            self.counters.populated.add(run.len());
            for blank in run.map(Blank) {
                match first {
                    Ok(_) => shard.put_warm(blank),
                    Err(_) => first = Ok(blank),
                }
            }
        }
        first
    }

    /// Takes at most `many` frames that have never been used.
    fn take_fresh(&self, home: &Mutex<Shard>, many: usize) -> io::Result<Batch> {
        let mut fresh = self.fresh.load(Ordering::Relaxed);
        let first = loop {
            let end =
                Some(fresh + FIRST).filter(|&end| end <= END).ok_or(io::ErrorKind::StorageFull)?;
            // Address space first: if there is none, no frame is lost.
            self.reach(fresh as u32)?;
            match self.fresh.compare_exchange_weak(fresh, end, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(first) => break first as u32,
                Err(taken) => fresh = taken,
            }
        };
        let mut batch = Batch::default();
        let mut shard = lock(home);
        for frame in first..first + FIRST as u32 {
            if batch.len() < many {
                batch.push(frame);
            } else {
                shard.put_cold(&self.file, frame);
            }
        }
        Ok(batch)
    }

    /// Frees the RAM of `surplus`: free frames of `home` that no other thread knows.
    pub(super) fn punch(&self, surplus: Batch, home: &Mutex<Shard>) {
        for run in surplus.into_runs() {
            let punched = self.file.punch(run.clone());
            let mut shard = lock(home);
            match punched {
                Ok(()) => {
                    self.counters.populated.sub(run.len());
                    run.for_each(|frame| shard.put_cold(&self.file, frame));
                }
                // The next frame that becomes free causes a retry.
                Err(_) => run.for_each(|frame| shard.put_warm(Blank(frame))),
            }
        }
    }

    /// Frees all RAM that is kept for later writes, and the index's spare capacity.
    pub(crate) fn trim(&self) {
        for home in &self.shards {
            let mut shard = lock(home);
            shard.shrink(&self.file);
            // No more batches than there are now, as other threads add frames meanwhile.
            for _ in 0..shard.warm().div_ceil(BATCH) {
                let batch = shard.take_warm_batch();
                drop(shard);
                self.punch(batch, home);
                shard = lock(home);
            }
        }
    }
}
