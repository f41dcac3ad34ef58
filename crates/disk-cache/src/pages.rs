//! The cached pages: an index, and the memory that holds them.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::disk::PART;
use super::lender::PageLender;
use aquifer_page::{Bytes, PAGE_SIZE, lock};
use quick_cache::{DefaultHashBuilder, Lifecycle, UnitWeighter, unsync};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::io::Errno;

/// Number of shards, each with its own lock.
const SHARDS: u64 = 16;

/// Distance in bytes between the frames of two shards in the file: more than a shard fills.
const AREA: u64 = 1 << 48;

/// Adjacent pages in the same shard, so that a read of several mostly takes one lock.
const TOGETHER: u64 = 16;

/// The key of a cached page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Whether the page belongs to a cache on another host.
    pub(super) lent: bool,
    /// A number that is unique to one opening of a disk.
    pub(super) disk: u32,
    pub(super) page: u64,
}

/// Clean pages of disks, in memory of a size that can change at any time.
///
/// The pages are in a memfd, which has memory where a page is cached and nowhere else.
#[derive(Debug)]
pub(super) struct Pages {
    frames: File,
    shards: Vec<Mutex<Shard>>,
    /// The lenders that evicted pages go to, each for some of the keys.
    lenders: Vec<PageLender>,
    /// The capacity; the lock is held while it changes.
    size: Mutex<Bytes>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// The pages of some of the keys.
#[derive(Debug)]
struct Shard {
    /// The frame of each page.
    index: unsync::Cache<Key, u64, UnitWeighter, DefaultHashBuilder, Evicted>,
    /// Pages that the index has just evicted.
    evicted: Evicted,
    /// Number of pages that belong to borrowers.
    lent: u64,
    /// Frames without memory, all of them below `next`.
    free: Vec<u64>,
    next: u64,
}

/// The frame of a page that is about to get one.
const NO_FRAME: u64 = u64::MAX;

/// A record of the evicted pages and their frames.
#[derive(Clone, Debug, Default)]
struct Evicted(Arc<Mutex<Vec<(Key, u64)>>>);

impl Lifecycle<Key, u64> for Evicted {
    type RequestState = ();

    fn on_evict(&self, (): &mut (), key: Key, frame: u64) {
        if frame != NO_FRAME {
            lock(&self.0).push((key, frame));
        }
    }
}

impl Shard {
    fn new(number: u64) -> Self {
        let evicted = Evicted::default();
        let next = number * (AREA / PAGE_SIZE as u64);
        Self { index: index(0, &evicted), evicted, lent: 0, free: Vec::new(), next }
    }

    /// Returns the frame of a page, after allocating one if it has none; `leave` is called for the
    /// pages evicted for it. `None` if the page is not admitted.
    fn frame_for(&mut self, frames: &File, key: Key, leave: impl FnMut(Key, u64)) -> Option<u64> {
        if let Some(frame) = self.index.peek(&key) {
            return Some(*frame);
        }
        if self.index.capacity() == 0 {
            return None;
        }
        self.index.insert(key, NO_FRAME);
        let mut gone = self.take_evicted(leave);
        let frame = if let Some(mut is) = self.index.peek_mut(&key) {
            // The frame of a page that was just evicted still has its memory.
            let frame = gone.pop().or_else(|| self.free.pop()).unwrap_or(self.next);
            self.next = self.next.max(frame + 1);
            *is = frame;
            self.lent += u64::from(key.lent);
            Some(frame)
        } else {
            None
        };
        self.give_back(frames, gone);
        frame
    }

    /// Takes the frames of the pages that the index has evicted.
    fn take_evicted(&mut self, mut leave: impl FnMut(Key, u64)) -> Vec<u64> {
        let evicted = std::mem::take(&mut *lock(&self.evicted.0));
        let gone = evicted.into_iter().map(|(key, frame)| {
            self.lent -= u64::from(key.lent);
            leave(key, frame);
            frame
        });
        gone.collect()
    }

    fn forget(&mut self, frames: &File, key: Key) {
        if let Some((_, frame)) = self.index.remove(&key) {
            self.lent -= u64::from(key.lent);
            self.give_back(frames, vec![frame]);
        }
    }

    /// Frees the memory of frames.
    fn give_back(&mut self, frames: &File, mut gone: Vec<u64>) {
        gone.sort_unstable();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for run in gone.chunk_by(|one, next| one + 1 == *next) {
            let (start, length) = (run[0] * PAGE_SIZE as u64, run.len() as u64 * PAGE_SIZE as u64);
            while fallocate(frames, flags, start, length) == Err(Errno::INTR) {}
        }
        self.free.append(&mut gone);
    }
}

fn index(
    pages: u64,
    evicted: &Evicted,
) -> unsync::Cache<Key, u64, UnitWeighter, DefaultHashBuilder, Evicted> {
    let (hash, evicted) = (DefaultHashBuilder::default(), evicted.clone());
    unsync::Cache::with(pages as usize, pages, UnitWeighter, hash, evicted)
}

impl Pages {
    /// Makes an empty cache of this size.
    pub(super) fn new(size: Bytes, lenders: Vec<PageLender>) -> io::Result<Self> {
        let frames = File::from(memfd_create("aquifer-cache", MemfdFlags::CLOEXEC)?);
        let shards = (0..SHARDS).map(|number| Mutex::new(Shard::new(number))).collect();
        let (hits, misses) = Default::default();
        let this = Self { frames, shards, lenders, size: Mutex::default(), hits, misses };
        this.resize(size);
        Ok(this)
    }

    /// Sets the size; the cache is within it when this returns. The least valuable pages are
    /// evicted.
    pub(super) fn resize(&self, size: Bytes) {
        let mut now = lock(&self.size);
        let pages = size.0 / PAGE_SIZE as u64;
        for (number, shard) in (0..).zip(&self.shards) {
            let share = pages / SHARDS + u64::from(number < pages % SHARDS);
            let mut shard = lock(shard);
            let was_off = shard.index.capacity() == 0;
            shard.index.set_capacity(share);
            if was_off || share == 0 {
                // An index grown from zero would remember no evicted page; an index of size zero
                // need remember none.
                shard.index = index(share, &shard.evicted);
            }
            let gone = shard.take_evicted(|key, frame| self.leave(key, frame));
            shard.give_back(&self.frames, gone);
        }
        *now = size;
    }

    pub(super) fn size(&self) -> Bytes {
        *lock(&self.size)
    }

    /// Returns the size of the cached pages, which is also the memory that they take.
    pub(super) fn used(&self) -> Bytes {
        let pages: usize = self.shards.iter().map(|shard| lock(shard).index.len()).sum();
        Bytes(pages as u64 * PAGE_SIZE as u64)
    }

    /// Returns the part of that which belongs to borrowers.
    pub(super) fn lent(&self) -> Bytes {
        Bytes(self.shards.iter().map(|shard| lock(shard).lent).sum::<u64>() * PAGE_SIZE as u64)
    }

    pub(super) fn lenders(&self) -> &[PageLender] {
        &self.lenders
    }

    /// Returns the memory that the file takes, by the system's count.
    #[cfg(test)]
    pub(super) fn taken(&self) -> Bytes {
        use std::os::unix::fs::MetadataExt as _;
        Bytes(self.frames.metadata().map_or(u64::MAX, |is| is.blocks() * 512))
    }

    /// Returns the numbers of hits and misses.
    pub(super) fn counts(&self) -> [u64; 2] {
        [self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed)]
    }

    /// Reads a part of a page; returns whether the page is cached.
    pub(super) fn read(&self, key: Key, offset: usize, into: &mut [u8]) -> bool {
        let shard = self.shard(key);
        let frame = shard.index.get(&key).copied();
        let read = frame.is_some_and(|frame| {
            self.frames.read_exact_at(into, frame * PAGE_SIZE as u64 + offset as u64).is_ok()
        });
        let counter = if read { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        read
    }

    /// Caches a page that equals the disk's, or a borrower's page. Returns whether it is cached
    /// now.
    pub(super) fn put(&self, key: Key, page: &[u8]) -> bool {
        self.put_in(&mut self.shard(key), key, page)
    }

    /// Caches a page with new content.
    pub(super) fn change(&self, key: Key, page: &[u8]) {
        let mut shard = self.shard(key);
        // An eviction of the old content also holds the shard's lock, so it comes before this or
        // sees the new content.
        if let Some(lender) = self.lender(key) {
            lender.forget(key);
        }
        self.put_in(&mut shard, key, page);
    }

    fn put_in(&self, shard: &mut Shard, key: Key, page: &[u8]) -> bool {
        let Some(frame) = shard.frame_for(&self.frames, key, |key, frame| self.leave(key, frame))
        else {
            self.offer(key, |copy| {
                copy.copy_from_slice(page);
                true
            });
            return false;
        };
        let written = self.frames.write_all_at(page, frame * PAGE_SIZE as u64).is_ok();
        if !written {
            // There is no memory for it, and the frame holds old content.
            shard.forget(&self.frames, key);
        }
        written
    }

    /// Reads consecutive whole pages of one part of a disk from a lender; returns whether it had
    /// all of them. The caller excludes writers.
    pub(super) fn read_remote(&self, first: Key, into: &mut [u8]) -> bool {
        self.lender(first).is_some_and(|lender| lender.read(first, into))
    }

    /// Offers an evicted page to its lender.
    fn leave(&self, key: Key, frame: u64) {
        self.offer(key, |copy| self.frames.read_exact_at(copy, frame * PAGE_SIZE as u64).is_ok());
    }

    fn offer(&self, key: Key, fill: impl FnOnce(&mut [u8]) -> bool) {
        if let Some(lender) = self.lender(key) {
            lender.offer(key, fill);
        }
    }

    /// Returns the lender for a page of this host; one lender has all pages of a part of a disk.
    fn lender(&self, key: Key) -> Option<&PageLender> {
        let part = key.page * PAGE_SIZE as u64 / PART;
        if key.lent || self.lenders.is_empty() {
            return None;
        }
        self.lenders.get((part % self.lenders.len() as u64) as usize)
    }

    /// Drops consecutive pages here and at the lenders.
    pub(super) fn forget(&self, first: Key, pages: u64) {
        let end = first.page.saturating_add(pages);
        self.forget_here(first, end);
        // Pages evicted meanwhile were offered before this call reaches the lenders.
        for lender in self.lenders.iter().filter(|_| !first.lent) {
            lender.give_back(first, end - first.page);
        }
    }

    fn forget_here(&self, first: Key, end: u64) {
        let cached = self.shards.iter().map(|shard| lock(shard).index.len() as u64).sum();
        if end - first.page <= cached {
            for page in first.page..end {
                let key = Key { page, ..first };
                self.shard(key).forget(&self.frames, key);
            }
            return;
        }
        for shard in &self.shards {
            let mut shard = lock(shard);
            let gone = RefCell::new(Vec::new());
            shard.index.retain(|key, frame| {
                let is_meant = (key.lent, key.disk) == (first.lent, first.disk)
                    && (first.page..end).contains(&key.page);
                if is_meant {
                    gone.borrow_mut().push(*frame);
                }
                !is_meant
            });
            let gone = gone.into_inner();
            shard.lent -= if first.lent { gone.len() as u64 } else { 0 };
            shard.give_back(&self.frames, gone);
        }
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        let together = (key.page / TOGETHER).wrapping_add(u64::from(key.disk) << 40);
        let mixed = together.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        lock(&self.shards[(mixed >> (u64::BITS - SHARDS.ilog2())) as usize])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn content(key: Key) -> Vec<u8> {
        let words = (0..PAGE / 8)
            .map(|word| (u64::from(key.disk) << 56 | key.page << 16 | word).to_le_bytes());
        words.flatten().collect()
    }

    fn put(pages: &Pages, key: Key) {
        pages.put(key, &content(key));
    }

    fn is_there(pages: &Pages, key: Key) -> bool {
        let mut page = vec![0; PAGE_SIZE];
        let there = pages.read(key, 0, &mut page);
        assert!(!there || page == content(key), "{key:?}");
        there
    }

    fn has(pages: &Pages, most: Bytes) {
        assert_eq!(pages.used(), pages.taken());
        assert!(pages.used() <= most, "{} of {most}", pages.used());
    }

    #[test]
    fn memory_is_taken_for_pages_that_are_cached_and_for_no_others() {
        let pages = Pages::new(Bytes::mib(4), Vec::new()).unwrap();
        has(&pages, Bytes::ZERO);
        let keys = |disk| (0..3000).map(move |page| Key { lent: false, disk, page });
        keys(1).for_each(|key| put(&pages, key));
        has(&pages, Bytes::mib(4));
        assert!(pages.used() > Bytes::mib(3), "{}", pages.used());
        assert_eq!(
            Bytes(keys(1).filter(|key| is_there(&pages, *key)).count() as u64 * PAGE),
            pages.used()
        );
        for size in [3 << 20, 1 << 20, 17 * PAGE, 1, 0] {
            pages.resize(Bytes(size));
            has(&pages, Bytes(size));
        }
        put(&pages, Key { lent: false, disk: 1, page: 0 });
        has(&pages, Bytes::ZERO);
        pages.resize(Bytes::mib(16));
        keys(2).for_each(|key| put(&pages, key));
        assert_eq!(pages.used(), Bytes(3000 * PAGE));
        has(&pages, Bytes::mib(16));
        assert!(
            keys(2).all(|key| is_there(&pages, key)) && !keys(1).any(|key| is_there(&pages, key))
        );
    }

    #[test]
    fn a_page_keeps_its_last_content_until_it_is_forgotten() {
        let pages = Pages::new(Bytes::mib(4), Vec::new()).unwrap();
        let (one, other) =
            (Key { lent: false, disk: 1, page: 7 }, Key { lent: false, disk: 2, page: 7 });
        pages.change(one, &vec![1; PAGE_SIZE]);
        put(&pages, one);
        put(&pages, other);
        assert!(is_there(&pages, one) && is_there(&pages, other));
        assert_eq!(pages.used(), Bytes(2 * PAGE));
        let mut part = [0; 100];
        assert!(pages.read(one, 50, &mut part));
        assert_eq!(part[..], content(one)[50..150]);
        pages.forget(one, 1);
        assert!(!is_there(&pages, one) && is_there(&pages, other));
        pages.forget(Key { page: 0, ..other }, u64::MAX);
        assert!(!is_there(&pages, other));
        has(&pages, Bytes::ZERO);
        assert_eq!(pages.counts(), [4, 2]);
    }

    #[test]
    fn pages_read_again_outlive_pages_read_once() {
        let pages = Pages::new(Bytes(512 * PAGE), Vec::new()).unwrap();
        let often = |page| Key { lent: false, disk: 1, page };
        for round in 0..50 {
            (0..128)
                .map(often)
                .filter(|key| !is_there(&pages, *key))
                .for_each(|key| put(&pages, key));
            (0..256).for_each(|page| {
                put(&pages, Key { lent: false, disk: 2, page: round * 256 + page })
            });
        }
        assert!((0..128).map(often).filter(|key| is_there(&pages, *key)).count() > 100);
    }
}
