//! The frames of a group: an index by content, and reference counts.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_page::{PAGE_SIZE, lock};

use super::counters::Counters;
use super::fingerprint::Key;
use super::shard::Shard;
use crate::SharedUsage;
use crate::ram::RamLock;
use crate::sys::{Blank, FrameFile};

/// Shards of the index, with a lock each, so that threads seldom wait: a critical section takes
/// about 100 ns.
const SHARDS: usize = 32;

/// The frames of one group, each content once, with their index and key. Two groups share nothing
/// but the tmpfs.
///
/// Frames count from 1 and fit 32 bits: 16 TiB a group.
#[derive(Debug)]
pub(crate) struct GroupFrames {
    pub(super) file: FrameFile,
    pub(super) key: Key,
    pub(super) shards: [Mutex<Shard>; SHARDS],
    /// The first frame that has never been used.
    pub(super) fresh: AtomicU64,
    pub(super) counters: Counters,
    pub(super) ram: Arc<RamLock>,
}

impl GroupFrames {
    /// Takes over `file`; counts none of its frames as in use.
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

    /// Makes address space for `frame` if it is missing.
    pub(super) fn reach(&self, frame: u32) -> io::Result<()> {
        if let Some(locked) = self.file.reach(frame)? {
            self.ram.note(locked);
        }
        Ok(())
    }

    /// Takes a reference to a frame with this content: an existing one, or else a new one.
    ///
    /// # Errors
    /// The kernel's, if it has no room for a new frame.
    pub(crate) fn share(&self, content: &[u8; PAGE_SIZE]) -> io::Result<u32> {
        let fingerprint = self.key.fingerprint(content);
        let shard = self.shard_of(fingerprint);
        let found = self.refer(&lock(shard), fingerprint);
        if let Some(frame) = self.if_equal(found, content) {
            return Ok(frame);
        }
        let frame = self.file.fill(self.blank(shard)?, content);
        self.file.meta(frame).references.store(1, Ordering::Relaxed);
        self.counters.frames.add(1);
        self.counters.references.add(1);
        // Another thread may have published the same content meanwhile.
        Ok(self
            .publish(frame, fingerprint, content)
            .inspect(|_| _ = self.release(frame))
            .unwrap_or(frame))
    }

    /// Refills a frame to which only the caller has a reference, when there is no room for another
    /// frame. Returns the frame that has the content, or `None` if others refer to the frame too.
    ///
    /// If the returned frame is another one, the caller holds references to both. A crash during
    /// the refill may leave part of the content.
    pub(crate) fn rewrite(&self, frame: u32, content: &[u8; PAGE_SIZE]) -> Option<u32> {
        let before = self.file.meta(frame).fingerprint.load(Ordering::Relaxed);
        {
            let mut shard = lock(self.shard_of(before));
            if self.references(frame) > 1 {
                return None;
            }
            // The index does not list the frame from here on, so no thread can take a reference.
            shard.remove(&self.file, frame);
        }
        let frame = self.file.fill(Blank(frame), content);
        Some(self.publish(frame, self.key.fingerprint(content), content).unwrap_or(frame))
    }

    /// Adds a frame with this content to the index, unless an equal frame is there: then takes a
    /// reference to that one and returns it. If only the fingerprints are equal, the frame stays
    /// out of the index.
    pub(super) fn publish(
        &self,
        frame: u32,
        fingerprint: u64,
        content: &[u8; PAGE_SIZE],
    ) -> Option<u32> {
        self.file.meta(frame).fingerprint.store(fingerprint, Ordering::Relaxed);
        let found = {
            let mut shard = lock(self.shard_of(fingerprint));
            let found = self.refer(&shard, fingerprint);
            if found.is_none() && shard.find(&self.file, fingerprint).is_none() {
                shard.insert(&self.file, frame);
            }
            found
        };
        self.if_equal(found, content)
    }

    /// Takes a reference to the frame with this fingerprint, if the index has one.
    fn refer(&self, shard: &Shard, fingerprint: u64) -> Option<u32> {
        let frame = shard.find(&self.file, fingerprint)?;
        let more = |references: u32| references.checked_add(1);
        // The count holds at most 16 TiB of equal pages; the next such page gets a frame of its
        // own.
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

    /// Returns the found frame, to which the caller holds a reference, if its content is equal.
    /// Otherwise releases it.
    fn if_equal(&self, found: Option<u32>, content: &[u8; PAGE_SIZE]) -> Option<u32> {
        let frame = found?;
        if self.page(frame) == content {
            return Some(frame);
        }
        self.release(frame);
        None
    }

    /// Gives up a reference; with the last one the frame becomes free. Returns whether others still
    /// refer to it.
    pub(crate) fn release(&self, frame: u32) -> bool {
        let meta = self.file.meta(frame);
        let one_of_many = |references: u32| (references > 1).then(|| references - 1);
        self.counters.references.sub(1);
        // Release, and Acquire for the last one: all reads of the frame end before it is filled
        // again.
        if let Ok(before) =
            meta.references.fetch_update(Ordering::Release, Ordering::Relaxed, one_of_many)
        {
            self.left(before);
            return true;
        }
        let fingerprint = meta.fingerprint.load(Ordering::Relaxed);
        let home = self.shard_of(fingerprint);
        let mut shard = lock(home);
        // Under the lock no thread can find the frame, so the last reference stays the last.
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

    /// Notes that one of `before` references, not the last, was given up.
    fn left(&self, before: u32) {
        if before == 2 {
            self.counters.shared.sub(1);
        }
    }

    /// Counts a write to a page whose content other pages still have.
    pub(super) fn broke(&self) {
        self.counters.breaks.add(1);
    }

    /// Returns the contents of a frame to which the caller holds a reference.
    pub(super) fn page(&self, frame: u32) -> &[u8; PAGE_SIZE] {
        self.bytes(frame..frame + 1).try_into().expect("a frame is a page")
    }

    /// Returns the contents of `frames`, all in one extent, to each of which the caller holds a
    /// reference.
    pub(crate) fn bytes(&self, frames: Range<u32>) -> &[u8] {
        self.file.bytes(frames)
    }

    /// Returns how much the group stores and takes.
    pub(crate) fn usage(&self) -> SharedUsage {
        self.counters.usage()
    }

    /// Returns the shard of this fingerprint. Uses bits that the shard's index does not.
    pub(super) fn shard_of(&self, fingerprint: u64) -> &Mutex<Shard> {
        &self.shards[(fingerprint >> 40) as usize % SHARDS]
    }
}
