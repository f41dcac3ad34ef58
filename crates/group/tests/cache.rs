//! A cache of disks as its clients find it: what was written is what is read, byte by byte, while the cache grows and shrinks all the time.
//!
//! Needs root. `AQUIFER_SECONDS` says how long clients work (4 unless told).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_fabric::Address;
use aquifer_fabric::nbd::client::{Connection, NbdError, Target};
use aquifer_group::cache::{self, CacheError, READ_ONLY, Service};
use aquifer_page::{Bytes, Group, PAGE_SIZE};
use aquifer_region::process::GroupFiles;

const PATIENCE: Duration = Duration::from_secs(30);
const PAGE: u64 = PAGE_SIZE as u64;

fn is_root() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        eprintln!("skipped: needs root");
    }
    is
}

/// A directory with regions of a group, of which there are none, and its cache.
struct Here {
    service: Option<Service>,
    dir: tempfile::TempDir,
    group: Group,
}

impl Here {
    fn new(size: Bytes) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let group: Group = "blue".parse().unwrap();
        let service = Some(Service::start(&dir.path().join("regions"), group.clone(), size, false).unwrap());
        Self { service, dir, group }
    }

    fn regions(&self) -> PathBuf {
        self.dir.path().join("regions")
    }

    /// A disk full of what is nowhere twice.
    fn disk(&self, name: &str, size: u64) -> (PathBuf, Vec<u8>) {
        let path = self.dir.path().join(name);
        let words = (0..size.div_ceil(8)).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        let mut content: Vec<u8> = words.flatten().collect();
        content.truncate(size as usize);
        fs::write(&path, &content).unwrap();
        (path, content)
    }

    fn connect(&self, path: &Path) -> Connection {
        self.export(path.to_str().unwrap()).unwrap()
    }

    fn export(&self, name: &str) -> Result<Connection, NbdError> {
        let address = Address::Unix(GroupFiles::new(&self.regions(), &self.group).cache_disks());
        Connection::connect(Arc::new(Target { address, export: name.to_owned(), tls: None }), PATIENCE)
    }

    fn status(&self) -> cache::Status {
        cache::status(&self.regions(), &self.group).unwrap().unwrap()
    }

    fn resize(&self, size: Bytes) {
        let status = cache::resize(&self.regions(), &self.group, size).unwrap().unwrap();
        assert!(status.size == size && status.used <= size, "{status:?}");
    }

    fn has_mounts(&self) -> bool {
        fs::read_to_string("/proc/self/mounts").unwrap().contains(self.dir.path().to_str().unwrap())
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.service = None;
        assert!(thread::panicking() || !self.has_mounts());
    }
}

/// Numbers that look like chance, the same for the same seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }

    fn range(&mut self, within: &Range<u64>, longest: u64) -> Range<u64> {
        let start = within.start + self.below(within.end - within.start);
        start..start + 1 + self.below(longest.min(within.end - start))
    }
}

/// A client with bytes that only it writes, and knows.
struct Worker {
    connection: Connection,
    chance: Chance,
    /// The disk, of which its bytes are right.
    content: Vec<u8>,
    /// Ranges of its own. Others' are in the same pages.
    slots: Vec<Range<u64>>,
    /// A long one, whose pages nobody else has.
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
        let (value, bytes) = (self.chance.below(u64::MAX), range.start as usize..range.end as usize);
        let new: Vec<u8> = (range.clone()).map(|at| (value >> (at % 8 * 8)) as u8 ^ at as u8).collect();
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
            // Of what is given back, whole pages are.
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

const WORKERS: u64 = 4;
/// Bytes that each of them has in a row: no part of a page or a sector.
const SLOT: u64 = 1001;
const SHARED: u64 = 4 << 20;
const ALONE: u64 = 2 << 20;

#[test]
fn what_clients_write_is_what_they_read_while_the_cache_changes_its_size_all_the_time() {
    if !is_root() {
        return;
    }
    let seconds = std::env::var("AQUIFER_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let here = Here::new(Bytes::mib(4));
    // The last page is a part of one.
    let (path, content) = here.disk("disk", SHARED + WORKERS * ALONE + 777);
    let until = Instant::now() + Duration::from_secs(seconds);
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
                scope.spawn(move || {
                    while Instant::now() < until {
                        worker.work();
                    }
                    worker.verify_all();
                    worker
                })
            })
            .collect();
        let resizing = scope.spawn(|| {
            let mut chance = Chance(99);
            while !ended.load(Ordering::Relaxed) {
                let size = if chance.below(4) == 0 { 0 } else { chance.below(8 << 20) };
                here.resize(Bytes(size));
                thread::sleep(Duration::from_millis(chance.below(20)));
            }
        });
        let done = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        ended.store(true, Ordering::Relaxed);
        resizing.join().unwrap();
        done
    });
    let status = here.status();
    assert!(status.hits > 100 && status.misses > 100, "{status:?}");
    assert_eq!((status.disks.len(), status.disks[0].connections), (1, WORKERS));

    // It is all in the file.
    let mut expected = content;
    for worker in workers {
        for range in worker.slots.iter().chain([&worker.alone]) {
            let bytes = range.start as usize..range.end as usize;
            expected[bytes.clone()].copy_from_slice(&worker.content[bytes]);
        }
        let mut worker = worker;
        worker.connection.flush().unwrap();
    }
    let read = fs::read(&path).unwrap();
    let wrong = read.iter().zip(&expected).position(|(is, should)| is != should);
    assert_eq!((read.len(), wrong), (expected.len(), None));
}

#[test]
fn what_was_read_is_cached_until_nobody_has_the_disk_any_more() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    let (path, content) = here.disk("disk", 1 << 20);
    let mut one = here.connect(&path);
    let mut read = vec![0; content.len()];
    for _ in 0..2 {
        one.read(0, &mut read).unwrap();
        assert!(read == content);
    }
    let status = here.status();
    assert_eq!((status.hits, status.misses, status.used), (256, 256, Bytes::mib(1)));
    assert_eq!(status.read_bytes, Bytes::mib(2));
    drop(one);
    let deadline = Instant::now() + PATIENCE;
    while !here.status().disks.is_empty() {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(here.status().used, Bytes::ZERO);
    // Whatever it is now is what is read.
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    here.connect(&path).read(0, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 7));
}

#[test]
fn a_disk_is_read_by_all_or_written_by_one() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    let (path, content) = here.disk("disk", 1 << 20);
    let to_read = format!("{READ_ONLY}{}", path.display());
    let (mut one, mut other) = (here.export(&to_read).unwrap(), here.export(&to_read).unwrap());
    assert!(one.is_read_only() && !one.can_trim());
    let mut read = vec![0; content.len()];
    for reader in [&mut one, &mut other] {
        reader.read(0, &mut read).unwrap();
        assert!(read == content);
    }
    assert_eq!(here.status().hits, 256);
    assert!(one.write(0, &[1]).unwrap_err().to_string().contains("not permitted"));
    one.read(0, &mut read).unwrap();
    assert!(read == content);
    let refused = here.export(path.to_str().unwrap()).unwrap_err().to_string();
    assert!(refused.contains("read by others"), "{refused}");
    drop((one, other));
    let deadline = Instant::now() + PATIENCE;
    let mut writer = loop {
        match here.export(path.to_str().unwrap()) {
            Ok(writer) => break writer,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    assert!(!writer.is_read_only() && writer.can_multi_conn());
    writer.write(0, &[1]).unwrap();
    // By another name it is the same disk.
    let link = here.dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    here.connect(&link).read(0, &mut read).unwrap();
    assert_eq!(read[..2], [1, content[1]]);
    let refused = here.export(&to_read).unwrap_err().to_string();
    assert!(refused.contains(&format!("written by process {}", std::process::id())), "{refused}");
    for (name, why) in [
        ("/no/such/file", "No such file"),
        ("disk", "no export"),
        ("", "no export"),
        ("/dev/null", "neither a file nor a block device"),
    ] {
        let refused = here.export(name).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn an_error_of_the_disk_is_one_of_its_client_and_of_nobody_else() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    let (path, content) = here.disk("disk", 1 << 20);
    let mut client = here.connect(&path);
    let mut read = vec![0; 64 << 10];
    client.read(0, &mut read).unwrap();
    // What is not there any more cannot be read, what is cached can.
    File::options().write(true).open(&path).unwrap().set_len(512 << 10).unwrap();
    let mut large = vec![0; 1 << 20];
    assert!(client.read(0, &mut large).unwrap_err().to_string().contains("error 5"));
    assert!(client.read(1020 << 10, &mut read[..4096]).is_err());
    client.read(0, &mut read).unwrap();
    assert!(read == content[..64 << 10]);
    assert!(client.read(1 << 20, &mut read[..1]).is_err());
    assert!(client.write(1 << 20, &[1]).is_err());
    client.flush().unwrap();
}

#[test]
fn an_image_that_grows_has_room_to() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    // What the head of an image says, of a guest's disk of 100 MiB.
    let mut head = b"QFI\xfb\0\0\0\x03".to_vec();
    head.resize(24, 0);
    head.extend((100_u64 << 20).to_be_bytes());
    head.resize(5000, 1);
    let path = here.dir.path().join("image.qcow2");
    fs::write(&path, &head).unwrap();
    let mut client = here.connect(&path);
    assert!(client.size() > Bytes::mib(200), "{}", client.size());
    let mut read = vec![9; 10_000];
    client.read(0, &mut read).unwrap();
    assert!(read[..5000] == head && read[5000..].iter().all(|byte| *byte == 0));
    client.write(150 << 20, &[8; 600]).unwrap();
    client.flush().unwrap();
    here.resize(Bytes::ZERO);
    client.read((150 << 20) - 100, &mut read).unwrap();
    assert!(read[..100].iter().all(|byte| *byte == 0) && read[100..700] == [8; 600] && read[700] == 0);
}

#[test]
fn there_is_one_cache_of_a_group_and_nothing_is_left_of_it() {
    if !is_root() {
        return;
    }
    let mut here = Here::new(Bytes::ZERO);
    let again = Service::start(&here.regions(), here.group.clone(), Bytes::ZERO, false);
    assert!(matches!(again, Err(CacheError::Busy(_))), "{again:?}");
    let red: Group = "red".parse().unwrap();
    assert_eq!(cache::status(&here.regions(), &red).unwrap(), None);
    assert_eq!(cache::resize(&here.regions(), &red, Bytes::mib(1)).unwrap(), None);
    drop(Service::start(&here.regions(), red, Bytes::ZERO, false).unwrap());
    assert!(here.has_mounts());
    here.service = None;
    assert_eq!(cache::status(&here.regions(), &here.group).unwrap(), None);
    assert!(!here.has_mounts());
}
