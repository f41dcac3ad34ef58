//! Random direct I/O by several threads on a block device that reads as zeros, with every byte
//! checked.
//!
//! `checked-io DEVICE OPERATIONS [SEED]` performs OPERATIONS writes, reads and discards in each
//! thread, then reads the threads' shares of the device. The program exits with 1 at the first
//! wrong byte.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use aquifer_page::PAGE_SIZE;
use rustix::fs::{FallocateFlags, OFlags, fallocate};

/// Number of threads; each has parts of the device that no other thread touches.
const THREADS: u64 = 4;

/// Pages in a part; no operation crosses a part's border.
const PART_PAGES: u64 = 64;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, operations, seed @ ..] = &arguments[..] else {
        bail!("usage: checked-io DEVICE OPERATIONS [SEED]")
    };
    let operations: u64 = operations.parse().context("OPERATIONS is not a number")?;
    let seed: u64 =
        seed.first().map_or(Ok(1), |seed| seed.parse()).context("SEED is not a number")?;

    let verified = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|index| {
                scope.spawn(move || {
                    let mut share = Share::open(path, index, seed)?;
                    (0..operations).try_for_each(|_| share.operate())?;
                    share.verify()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread panicked"))
            .sum::<Result<u64>>()
    })?;
    println!(
        "checked-io: {} operations on {path}, {verified} pages verified",
        operations * THREADS
    );
    Ok(())
}

/// One thread's share of the device, with its expected content.
struct Share {
    device: File,
    index: u64,
    /// How often each page of the share was written since its last discard; 0 means zeros.
    generations: Vec<u64>,
    random: u64,
    buffer: Aligned,
}

impl Share {
    fn open(path: &str, index: u64, seed: u64) -> Result<Self> {
        let mut device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(path)
            .with_context(|| format!("cannot open {path}"))?;
        let pages = device.seek(SeekFrom::End(0))? / PAGE_SIZE as u64;
        let parts = pages / PART_PAGES / THREADS;
        ensure!(parts > 0, "{path} is too small: {pages} pages");
        Ok(Self {
            device,
            index,
            generations: vec![0; (parts * PART_PAGES) as usize],
            random: mix(seed ^ index << 32),
            buffer: Aligned::new(PART_PAGES as usize * PAGE_SIZE),
        })
    }

    /// Writes, reads or discards a few pages somewhere in the share.
    fn operate(&mut self) -> Result<()> {
        let parts = self.generations.len() as u64 / PART_PAGES;
        let first = self.below(parts) * PART_PAGES + self.below(PART_PAGES);
        let count = 1 + self.below(PART_PAGES - first % PART_PAGES);
        match self.below(100) {
            0..45 => self.write(first, count),
            45..85 => self.check(first, count),
            _ => self.discard(first, count),
        }
    }

    fn write(&mut self, first: u64, count: u64) -> Result<()> {
        for page in first..first + count {
            self.generations[page as usize] += 1;
            let content = self.content(page);
            let at = (page - first) as usize * PAGE_SIZE;
            content.fill(&mut self.buffer[at..at + PAGE_SIZE]);
        }
        let data = &self.buffer[..count as usize * PAGE_SIZE];
        self.device
            .write_all_at(data, self.offset(first))
            .with_context(|| format!("cannot write {count} pages at {:#x}", self.offset(first)))
    }

    fn discard(&mut self, first: u64, count: u64) -> Result<()> {
        self.generations[first as usize..(first + count) as usize].fill(0);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.device, flags, self.offset(first), count * PAGE_SIZE as u64)
            .with_context(|| format!("cannot discard {count} pages at {:#x}", self.offset(first)))
    }

    fn check(&mut self, first: u64, count: u64) -> Result<()> {
        let offset = self.offset(first);
        let data = &mut self.buffer[..count as usize * PAGE_SIZE];
        self.device
            .read_exact_at(data, offset)
            .with_context(|| format!("cannot read {count} pages at {offset:#x}"))?;
        for page in first..first + count {
            let at = (page - first) as usize * PAGE_SIZE;
            if let Some(wrong) = self.content(page).difference(&self.buffer[at..at + PAGE_SIZE]) {
                let offset = offset as usize + at + wrong * 8;
                bail!(
                    "the word at {offset:#x} has wrong content (generation {})",
                    self.generations[page as usize]
                );
            }
        }
        Ok(())
    }

    /// Checks the whole share; returns its number of pages.
    fn verify(&mut self) -> Result<u64> {
        let pages = self.generations.len() as u64;
        (0..pages / PART_PAGES).try_for_each(|part| self.check(part * PART_PAGES, PART_PAGES))?;
        Ok(pages)
    }

    /// Returns the device offset of a page of the share; the parts of the shares alternate.
    fn offset(&self, page: u64) -> u64 {
        let part = page / PART_PAGES * THREADS + self.index;
        (part * PART_PAGES + page % PART_PAGES) * PAGE_SIZE as u64
    }

    fn content(&self, page: u64) -> Content {
        match self.generations[page as usize] {
            0 => Content::Zeros,
            generation => Content::Words(mix(self.offset(page) << 20 ^ generation)),
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(1);
        mix(self.random) % limit
    }
}

/// The expected content of a page.
enum Content {
    Zeros,
    /// Consecutive words from this first one.
    Words(u64),
}

impl Content {
    fn word(&self, index: usize) -> u64 {
        match self {
            Self::Zeros => 0,
            Self::Words(first) => first.wrapping_add(index as u64),
        }
    }

    fn fill(&self, page: &mut [u8]) {
        let words = page.chunks_exact_mut(8).enumerate();
        words.for_each(|(index, word)| word.copy_from_slice(&self.word(index).to_ne_bytes()));
    }

    /// Returns the index of the first wrong word.
    fn difference(&self, page: &[u8]) -> Option<usize> {
        page.chunks_exact(8)
            .enumerate()
            .position(|(index, word)| word != self.word(index).to_ne_bytes())
    }
}

/// Hashes a number well enough (the finaliser of splitmix64).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A buffer that begins at a page's border, as direct I/O requires.
struct Aligned {
    data: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let data = vec![0; len + PAGE_SIZE];
        let start = data.as_ptr().align_offset(PAGE_SIZE);
        Self { data, start }
    }
}

impl Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.data[self.start..]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.data[self.start..]
    }
}
