//! A disk cache, and clients that know the content they must read.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed, and does not use all of this"
)]

#[path = "../../../../hosts/src/wait.rs"]
mod wait;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_disk_cache::{self as cache, Options, Service};
use aquifer_nbd::client::{Connection, NbdError, Target};
use aquifer_page::{Bytes, Group, PAGE_SIZE};
use aquifer_region::process::GroupFiles;
use aquifer_transport::Address;
use wait::wait_until;

pub const TIMEOUT: Duration = Duration::from_secs(120);
pub const PAGE: u64 = PAGE_SIZE as u64;

pub fn is_root() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        eprintln!("skipped: needs root");
    }
    is
}

/// A directory for regions of a group, without any regions, and the group's disk cache.
pub struct Here {
    pub service: Option<Service>,
    pub dir: tempfile::TempDir,
    pub group: Group,
}

impl Here {
    /// Starts a cache of this size.
    pub fn new(size: Bytes) -> Self {
        Self::with(Options { size, ..Options::default() })
    }

    pub fn with(options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut this = Self { service: None, dir, group: "blue".parse().unwrap() };
        this.start(options);
        this
    }

    /// Starts another cache in place of the last one.
    pub fn start(&mut self, options: Options) {
        self.service = Some(Service::start(&self.regions(), self.group.clone(), options).unwrap());
    }

    pub fn regions(&self) -> PathBuf {
        self.dir.path().join("regions")
    }

    /// Creates a disk without repeated content.
    pub fn disk(&self, name: &str, size: u64) -> (PathBuf, Vec<u8>) {
        let path = self.dir.path().join(name);
        let words = (0..size.div_ceil(8))
            .map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        let mut content: Vec<u8> = words.flatten().collect();
        content.truncate(size as usize);
        fs::write(&path, &content).unwrap();
        (path, content)
    }

    pub fn connect(&self, path: &Path) -> Connection {
        self.export(path.to_str().unwrap()).unwrap()
    }

    pub fn export(&self, name: &str) -> Result<Connection, NbdError> {
        let address = Address::Unix(GroupFiles::new(&self.regions(), &self.group).cache_disks());
        Connection::connect(
            Arc::new(Target { address, export: name.to_owned(), tls: None }),
            TIMEOUT,
        )
    }

    pub fn status(&self) -> cache::CacheStatus {
        cache::status(&self.regions(), &self.group).unwrap().unwrap()
    }

    pub fn resize(&self, size: Bytes) {
        let status = cache::resize(&self.regions(), &self.group, size).unwrap().unwrap();
        assert!(status.size == size && status.used <= size, "{status:?}");
    }

    pub fn has_mounts(&self) -> bool {
        fs::read_to_string("/proc/self/mounts").unwrap().contains(self.dir.path().to_str().unwrap())
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.service = None;
        assert!(thread::panicking() || !self.has_mounts());
    }
}

/// A pseudo-random generator: the same seed gives the same numbers.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }

    pub fn range(&mut self, within: &Range<u64>, longest: u64) -> Range<u64> {
        let start = within.start + self.below(within.end - within.start);
        start..start + 1 + self.below(longest.min(within.end - start))
    }
}

/// A client with ranges that only it writes, so that it knows their content.
struct Worker {
    connection: Connection,
    chance: Chance,
    /// The disk's content; right in the client's own ranges.
    content: Vec<u8>,
    /// The client's own ranges. Other clients have ranges in the same pages.
    slots: Vec<Range<u64>>,
    /// A long range whose pages no other client has.
    alone: Range<u64>,
}

impl Worker {
    fn work(&mut self) {
        let slot = self.slots[self.chance.below(self.slots.len() as u64) as usize].clone();
        match self.chance.below(10) {
            0..3 => {
                let range = self.chance.range(&slot, PAGE);
                self.write(range);
            }
            3..6 => self.verify(slot),
            6 => {
                let range = self.chance.range(&self.alone, 300 << 10);
                self.write(range);
            }
            7 => {
                let range = self.chance.range(&self.alone, 300 << 10);
                self.verify(range);
            }
            8 => {
                let range = self.chance.range(&self.alone, 100 << 10);
                self.zero(range);
            }
            _ => self.connection.flush().unwrap(),
        }
    }

    fn write(&mut self, range: Range<u64>) {
        let (value, bytes) =
            (self.chance.below(u64::MAX), range.start as usize..range.end as usize);
        let new: Vec<u8> =
            (range.clone()).map(|at| (value >> (at % 8 * 8)) as u8 ^ at as u8).collect();
        self.connection.write(range.start, &new).unwrap();
        self.content[bytes].copy_from_slice(&new);
    }

    fn zero(&mut self, range: Range<u64>) {
        let length = (range.end - range.start) as u32;
        let zeroed = if self.chance.below(2) == 0 {
            self.connection.write_zeroes(range.start, length).unwrap();
            range
        } else {
            self.connection.trim(range.start, length).unwrap();
            // Trim zeroes only whole pages.
            range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE
        };
        if !zeroed.is_empty() {
            self.content[zeroed.start as usize..zeroed.end as usize].fill(0);
        }
    }

    fn verify(&mut self, range: Range<u64>) {
        let mut read = vec![0; (range.end - range.start) as usize];
        self.connection.read(range.start, &mut read).unwrap();
        let expected = &self.content[range.start as usize..range.end as usize];
        let wrong = read.iter().zip(expected).position(|(is, should)| is != should);
        assert!(wrong.is_none(), "byte {} of {range:?} is wrong", wrong.unwrap());
    }

    fn verify_all(&mut self) {
        for range in self.slots.clone().into_iter().chain([self.alone.clone()]) {
            self.verify(range);
        }
    }
}

pub const WORKERS: u64 = 4;
/// Size in bytes of a slot: not a multiple of a page or a sector.
const SLOT: u64 = 1001;
const SHARED: u64 = 4 << 20;
const ALONE: u64 = 2 << 20;

/// Returns how long clients work.
pub fn seconds() -> Duration {
    let told = std::env::var("AQUIFER_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(told.unwrap_or(4))
}

/// Sets a flag when it is dropped, also by a panic.
struct Sets<'a>(&'a AtomicBool);

impl Drop for Sets<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Makes clients read, write and check a disk for at least `seconds`. Meanwhile calls `disturb`
/// repeatedly, until it returns true. Finally checks the whole file.
pub fn work(here: &Here, seconds: Duration, mut disturb: impl FnMut(&mut Chance) -> bool + Send) {
    // The last page is partial.
    let (path, content) = here.disk("disk", SHARED + WORKERS * ALONE + 777);
    let until = Instant::now() + seconds;
    let ended = AtomicBool::new(false);
    let workers: Vec<Worker> = thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                let starts = (number * SLOT..SHARED - SLOT).step_by((WORKERS * SLOT) as usize);
                let end = if number + 1 == WORKERS { 777 } else { 0 };
                let alone = SHARED + number * ALONE;
                let mut worker = Worker {
                    connection: here.connect(&path),
                    chance: Chance(number + 1),
                    content: content.clone(),
                    slots: starts.map(|start| start..start + SLOT).collect(),
                    alone: alone..alone + ALONE + end,
                };
                let ended = &ended;
                scope.spawn(move || {
                    while !ended.load(Ordering::Relaxed) {
                        worker.work();
                    }
                    worker.verify_all();
                    worker
                })
            })
            .collect();
        let disturbing = scope.spawn(|| {
            let _ends = Sets(&ended);
            let mut chance = Chance(99);
            loop {
                let has_come = disturb(&mut chance);
                let status = here.status();
                if has_come
                    && Instant::now() > until
                    && status.counts.hits > 100
                    && status.counts.misses > 100
                {
                    return;
                }
                assert!(until.elapsed() < TIMEOUT, "the expected status did not come: {status:?}");
                thread::sleep(Duration::from_millis(chance.below(20)));
            }
        });
        let disturbed = disturbing.join();
        let done: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        disturbed.unwrap();
        done.into_iter().map(Result::unwrap).collect()
    });
    let status = here.status();
    assert!(status.counts.hits > 100 && status.counts.misses > 100, "{status:?}");
    assert_eq!((status.disks.len(), status.disks[0].connections), (1, WORKERS));
    let mut expected = content;
    for mut worker in workers {
        for range in worker.slots.iter().chain([&worker.alone]) {
            let bytes = range.start as usize..range.end as usize;
            expected[bytes.clone()].copy_from_slice(&worker.content[bytes]);
        }
        worker.connection.flush().unwrap();
    }
    let read = fs::read(&path).unwrap();
    let wrong = read.iter().zip(&expected).position(|(is, should)| is != should);
    assert_eq!((read.len(), wrong), (expected.len(), None));
}

/// Waits until `is` returns true.
pub fn until(is: impl FnMut() -> bool) {
    wait_until("the cache is as expected", is);
}
