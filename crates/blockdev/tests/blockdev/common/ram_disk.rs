//! Disks in RAM for tests.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_blockdev::Disk;
use aquifer_page::{Bytes, PAGE_SIZE, WorkerId};

const SHARDS: usize = 64;

/// A sparse disk in RAM.
pub struct RamDisk {
    capacity: Bytes,
    shards: Vec<Mutex<HashMap<u64, Box<[u8; PAGE_SIZE]>>>>,
    pub discarded: AtomicU64,
    pub flushes: AtomicU64,
}

impl RamDisk {
    pub fn new(capacity: Bytes) -> Arc<Self> {
        Arc::new(Self {
            capacity,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            discarded: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
        })
    }

    /// Returns the number of pages stored.
    pub fn stored(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().unwrap().len()).sum()
    }

    /// Calls `f` for each page in the range, with the offset in the page and the range in the
    /// caller's data.
    fn each_page(offset: u64, len: usize, mut f: impl FnMut(u64, usize, std::ops::Range<usize>)) {
        let mut at = 0;
        while at < len {
            let position = offset + at as u64;
            let inside = (position % PAGE_SIZE as u64) as usize;
            let part = (PAGE_SIZE - inside).min(len - at);
            f(position / PAGE_SIZE as u64, inside, at..at + part);
            at += part;
        }
    }
}

impl Disk for RamDisk {
    fn capacity(&self) -> Bytes {
        self.capacity
    }

    fn read(&self, _worker: WorkerId, offset: u64, data: &mut [u8]) -> io::Result<()> {
        Self::each_page(offset, data.len(), |page, inside, range| {
            let shard = self.shards[page as usize % SHARDS].lock().unwrap();
            let len = range.len();
            match shard.get(&page) {
                Some(stored) => data[range].copy_from_slice(&stored[inside..inside + len]),
                None => data[range].fill(0),
            }
        });
        Ok(())
    }

    fn write(&self, _worker: WorkerId, offset: u64, data: &[u8]) -> io::Result<()> {
        Self::each_page(offset, data.len(), |page, inside, range| {
            let mut shard = self.shards[page as usize % SHARDS].lock().unwrap();
            let stored = shard.entry(page).or_insert_with(|| Box::new([0; PAGE_SIZE]));
            stored[inside..inside + range.len()].copy_from_slice(&data[range]);
        });
        Ok(())
    }

    fn discard(&self, _worker: WorkerId, offset: u64, len: u64) -> io::Result<()> {
        self.discarded.fetch_add(len, Ordering::Relaxed);
        Self::each_page(offset, len as usize, |page, inside, range| {
            let mut shard = self.shards[page as usize % SHARDS].lock().unwrap();
            if range.len() == PAGE_SIZE {
                shard.remove(&page);
            } else if let Some(stored) = shard.get_mut(&page) {
                stored[inside..inside + range.len()].fill(0);
            }
        });
        Ok(())
    }

    fn flush(&self, _worker: WorkerId) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A disk of zeros that fails every request that includes one bad byte.
pub struct FailingDisk {
    capacity: Bytes,
    bad: u64,
}

impl FailingDisk {
    pub fn new(capacity: Bytes, bad: u64) -> Arc<Self> {
        Arc::new(Self { capacity, bad })
    }

    fn try_range(&self, offset: u64, len: u64) -> io::Result<()> {
        if (offset..offset + len).contains(&self.bad) {
            Err(io::Error::other("bad byte"))
        } else {
            Ok(())
        }
    }
}

impl Disk for FailingDisk {
    fn capacity(&self) -> Bytes {
        self.capacity
    }

    fn read(&self, _worker: WorkerId, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.fill(0);
        self.try_range(offset, data.len() as u64)
    }

    fn write(&self, _worker: WorkerId, offset: u64, data: &[u8]) -> io::Result<()> {
        self.try_range(offset, data.len() as u64)
    }

    fn discard(&self, _worker: WorkerId, offset: u64, len: u64) -> io::Result<()> {
        self.try_range(offset, len)
    }

    fn flush(&self, _worker: WorkerId) -> io::Result<()> {
        Ok(())
    }
}
