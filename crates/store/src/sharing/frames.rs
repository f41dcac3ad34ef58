use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_page::PAGE_SIZE;

use super::counters::Counters;
use super::fingerprint::Key;
use super::shard::Shard;
use crate::SharedUsage;
use crate::ram::RamLock;
use crate::sys::{Blank, FrameFile};

/// Parts of the index that different pages use without waiting for one another: a critical section takes about 100 ns.
const SHARDS: usize = 32;

/// The frames of one group, in which each content is kept once, with their index and key. Two groups have nothing in
/// common but the tmpfs.
///
/// Frames count from 1 and fit 32 bits: 16 TiB a group.
#[derive(Debug)]
pub(crate) struct GroupFrames {
    pub(super) file: FrameFile,
    pub(super) key: Key,
    pub(super) shards: [Mutex<Shard>; SHARDS],
    /// The first frame that was never used.
    pub(super) fresh: AtomicU64,
    pub(super) counters: Counters,
    pub(super) ram: Arc<RamLock>,
}

impl GroupFrames {
    /// Takes over `file`, in which nothing is in use as far as this knows.
    pub(super) fn new(file: File, ram: Arc<RamLock>) -> io::Result<Self> {
        let frames = Self {
            file: FrameFile::new(file),
            key: Key::random(),
            shards: Default::default(),
            fresh: AtomicU64::new(super::free::FIRST),
            counters: Counters::default(),
            ram,
        };
        frames.reach(0)?;
        Ok(frames)
    }

    /// Sees to it that there is address space for `frame`.
    pub(super) fn reach(&self, frame: u32) -> io::Result<()> {
        if let Some(locked) = self.file.reach(frame)? {
            self.ram.note(locked);
        }
        Ok(())
    }

    /// A reference to a frame with this content: one that is there, or else a new one.
    ///
    /// # Errors
    /// The kernel's, if it has no room for a new one.
    pub(crate) fn share(&self, content: &[u8; PAGE_SIZE]) -> io::Result<u32> {
        let fingerprint = self.key.fingerprint(content);
        let shard = self.shard_of(fingerprint);
        let found = self.refer(&self.lock(shard), fingerprint);
        if let Some(frame) = self.if_equal(found, content) {
            return Ok(frame);
        }
        let frame = self.file.fill(self.blank(shard)?, content);
        self.file.meta(frame).references.store(1, Ordering::Relaxed);
        self.counters.frames.add(1);
        self.counters.references.add(1);
        // Somebody else may have stored the same meanwhile.
        Ok(self
            .publish(frame, fingerprint, content)
            .inspect(|_| _ = self.release(frame))
            .unwrap_or(frame))
    }

    /// Fills a frame anew to which only the caller has a reference, where there is no room for another. Returns the frame
    /// that has the content, or nothing if others refer to the frame too.
    ///
    /// If it is another, the caller has a reference to that one too. A crash on the way may leave a part of the content.
    pub(crate) fn rewrite(&self, frame: u32, content: &[u8; PAGE_SIZE]) -> Option<u32> {
        let before = self.file.meta(frame).fingerprint.load(Ordering::Relaxed);
        {
            let mut shard = self.lock(self.shard_of(before));
            if self.references(frame) > 1 {
                return None;
            }
            // From here on nobody finds it, so nobody gets a reference.
            shard.remove(&self.file, frame);
        }
        let frame = self.file.fill(Blank(frame), content);
        Some(self.publish(frame, self.key.fingerprint(content), content).unwrap_or(frame))
    }

    /// Has a frame with this content be found, unless another with the same is: a reference to that one. If it only looks
    /// the same, the frame stays out of the index.
    pub(super) fn publish(
        &self,
        frame: u32,
        fingerprint: u64,
        content: &[u8; PAGE_SIZE],
    ) -> Option<u32> {
        self.file.meta(frame).fingerprint.store(fingerprint, Ordering::Relaxed);
        let found = {
            let mut shard = self.lock(self.shard_of(fingerprint));
            let found = self.refer(&shard, fingerprint);
            if found.is_none() && shard.find(&self.file, fingerprint).is_none() {
                shard.insert(&self.file, frame);
            }
            found
        };
        self.if_equal(found, content)
    }

    /// Takes a reference to the frame with this fingerprint, if there is one.
    fn refer(&self, shard: &Shard, fingerprint: u64) -> Option<u32> {
        let frame = shard.find(&self.file, fingerprint)?;
        let more = |references: u32| references.checked_add(1);
        // Sixteen TiB of equal pages are as many as can be counted; the next one is kept by itself.
        let before = self
            .file
            .meta(frame)
            .references
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()?;
        self.counters.references.add(1);
        if before == 1 {
            self.counters.shared.add(1);
        }
        Some(frame)
    }

    /// The frame that was found, to which we have a reference, if its content is this one; if not, lets go of it.
    fn if_equal(&self, found: Option<u32>, content: &[u8; PAGE_SIZE]) -> Option<u32> {
        let frame = found?;
        if self.page(frame) == content {
            return Some(frame);
        }
        self.release(frame);
        None
    }

    /// Gives up a reference; the frame becomes free with the last one. Says whether others still refer to it.
    pub(crate) fn release(&self, frame: u32) -> bool {
        let meta = self.file.meta(frame);
        let one_of_many = |references: u32| (references > 1).then(|| references - 1);
        self.counters.references.sub(1);
        // Release, and Acquire for the last one: whatever others read of the frame is over before it is filled again.
        if let Ok(before) =
            meta.references.fetch_update(Ordering::Release, Ordering::Relaxed, one_of_many)
        {
            self.left(before);
            return true;
        }
        let fingerprint = meta.fingerprint.load(Ordering::Relaxed);
        let home = self.shard_of(fingerprint);
        let mut shard = self.lock(home);
        // Under the lock nobody finds the frame, so if this is the last reference, it stays the last.
        let before = meta.references.fetch_sub(1, Ordering::AcqRel);
        if before > 1 {
            self.left(before);
            return true;
        }
        shard.remove(&self.file, frame);
        shard.put_warm(Blank(frame));
        let surplus = shard.take_surplus();
        drop(shard);
        self.counters.frames.sub(1);
        self.punch(surplus, home);
        false
    }

    /// Notes that of so many references one was given up, not the last.
    fn left(&self, before: u32) {
        if before == 2 {
            self.counters.shared.sub(1);
        }
    }

    /// Notes that a page was written whose content others still have.
    pub(super) fn broke(&self) {
        self.counters.breaks.add(1);
    }

    /// The contents of a frame to which the caller holds a reference.
    pub(super) fn page(&self, frame: u32) -> &[u8; PAGE_SIZE] {
        self.bytes(frame..frame + 1).try_into().expect("a frame is a page")
    }

    /// The contents of `frames`, all of one piece, to each of which the caller holds a reference.
    pub(crate) fn bytes(&self, frames: Range<u32>) -> &[u8] {
        self.file.bytes(frames)
    }

    /// What the group stores and takes.
    pub(crate) fn usage(&self) -> SharedUsage {
        self.counters.usage()
    }

    /// Where content with this fingerprint belongs. By bits that the shard's index makes no use of.
    pub(super) fn shard_of(&self, fingerprint: u64) -> &Mutex<Shard> {
        &self.shards[(fingerprint >> 40) as usize % SHARDS]
    }

    pub(super) fn lock<'a>(&self, shard: &'a Mutex<Shard>) -> MutexGuard<'a, Shard> {
        // Changed by single calls that do not panic half way.
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
