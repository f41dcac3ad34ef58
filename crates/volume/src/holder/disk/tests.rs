//! Any order of writes, discards and ends of the process: a page that is read is the newest one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::File;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::encryption::{Encryption, PageCipher};
use crate::holder::{VerifiedHolder, Wrong};
use crate::tags::TagMemory;

const PAGES: u64 = 96;
const RING: u64 = 16;
const WORKER: WorkerId = WorkerId(0);

/// What outlives a process.
struct Remains {
    tags: TagMemory,
    encryption: Encryption,
    directory: TempDir,
}

/// A process with a disk copy.
struct Process {
    writer: DiskWriter,
    disk: DiskHolder,
    tags: Arc<Tags>,
    holder: VerifiedHolder,
}

impl Remains {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        File::create(directory.path().join("copy")).unwrap();
        let words: Vec<_> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
        let tags: TagMemory = Arc::new(words);
        Tags::lagging(tags.clone()).forget_all();
        Self { tags, encryption: Encryption::random(), directory }
    }

    fn start(&self) -> Process {
        let path = self.directory.path().join("copy");
        let file = FileHolder::open(&path, Bytes(PAGES * PAGE), 2).unwrap();
        let writer = DiskWriter::start(Bytes(RING * PAGE), Arc::default()).unwrap();
        let tags = Arc::new(Tags::lagging(self.tags.clone()));
        let disk = writer.add(file, tags.clone(), (PAGES, LeaseId(2), path));
        let cipher = PageCipher::new(&self.encryption, LeaseId(1));
        let holder = VerifiedHolder::new(Box::new(disk.clone()), Some(cipher), tags.clone(), 2);
        Process { writer, disk, tags, holder }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        page: u64,
        pages: u64,
        byte: u8,
    },
    Discard {
        page: u64,
        pages: u64,
    },
    Read {
        page: u64,
        pages: u64,
    },
    /// The thread has some time.
    Rest,
    Flush,
    /// The process ends, and another one begins.
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    prop_oneof![
        6 => (page.clone(), 1..40_u64, 1..=255_u8)
            .prop_map(|(page, pages, byte)| Step::Write { page, pages, byte }),
        3 => (page.clone(), 1..40_u64).prop_map(|(page, pages)| Step::Discard { page, pages }),
        4 => (page, 1..40_u64).prop_map(|(page, pages)| Step::Read { page, pages }),
        1 => Just(Step::Rest),
        1 => Just(Step::Flush),
        1 => Just(Step::End),
    ]
}

/// Reads a page, which is the newest version if it is known at all.
fn expect(process: &Process, page: u64, byte: u8) -> bool {
    let mut data = [0xee; PAGE_SIZE];
    match process.holder.read(WORKER, page * PAGE, &mut data) {
        Ok(()) => assert!(data == [byte; PAGE_SIZE], "page {page}"),
        Err(error) => {
            assert!(matches!(error, HolderError::Wrong(Wrong::Unknown)), "page {page}: {error}");
            return false;
        }
    }
    true
}

fn play(steps: Vec<Step>) {
    let remains = Remains::new();
    let mut process = remains.start();
    let mut newest = [0_u8; PAGES as usize];
    // Pages that this process or the file must have.
    let mut is_safe = [false; PAGES as usize];
    let mut has_ended_since_flush = [true; PAGES as usize];
    for step in steps {
        match step {
            Step::Write { page, pages, byte } => {
                let all = page..(page + pages).min(PAGES);
                let data = vec![byte; ((all.end - all.start) * PAGE) as usize];
                process.holder.write(WORKER, page * PAGE, &data).unwrap();
                for page in all {
                    newest[page as usize] = byte;
                    is_safe[page as usize] = true;
                    has_ended_since_flush[page as usize] = true;
                }
            }
            Step::Discard { page, pages } => {
                let all = page..(page + pages).min(PAGES);
                let length = (all.end - all.start) * PAGE;
                process.holder.discard(WORKER, page * PAGE, length).unwrap();
                for page in all {
                    newest[page as usize] = 0;
                    is_safe[page as usize] = true;
                    has_ended_since_flush[page as usize] = true;
                }
            }
            Step::Read { page, pages } => {
                for page in page..(page + pages).min(PAGES) {
                    let is_known = expect(&process, page, newest[page as usize]);
                    assert!(is_known || !is_safe[page as usize], "page {page} is lost");
                }
            }
            Step::Rest => thread::sleep(Duration::from_micros(300)),
            Step::Flush => {
                process.holder.flush(WORKER).unwrap();
                assert_eq!(process.disk.in_ring(), Bytes::ZERO);
                has_ended_since_flush = [false; PAGES as usize];
            }
            Step::End => {
                drop(process);
                process = remains.start();
                for page in 0..PAGES as usize {
                    // What a flush wrote, nobody has to write again.
                    is_safe[page] &= !has_ended_since_flush[page];
                }
            }
        }
    }
    for page in 0..PAGES {
        let is_known = expect(&process, page, newest[page as usize]);
        assert!(is_known || !is_safe[page as usize], "page {page} is lost");
        assert_eq!(is_known, !process.tags.is_unknown(page));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_page_on_the_disk_is_the_newest_or_unknown(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        play(steps);
    }
}

#[test]
fn a_full_ring_makes_writers_wait_and_loses_nothing() {
    let remains = Remains::new();
    let process = remains.start();
    let written = thread::scope(|threads| {
        let write = |worker: u64| {
            let process = &process;
            move || {
                for round in 1..=50_u8 {
                    for page in (0..PAGES).filter(|page| page % 2 == worker) {
                        let data = [round; PAGE_SIZE];
                        process
                            .holder
                            .write(WorkerId(worker as usize), page * PAGE, &data)
                            .unwrap();
                        assert!(process.disk.in_ring() <= Bytes(RING * PAGE));
                    }
                }
            }
        };
        let both = [threads.spawn(write(0)), threads.spawn(write(1))];
        both.into_iter().all(|writer| writer.join().is_ok())
    });
    assert!(written);
    assert!((0..PAGES).all(|page| expect(&process, page, 50)));
    process.holder.flush(WORKER).unwrap();
    drop(process);
    let next = remains.start();
    assert!((0..PAGES).all(|page| expect(&next, page, 50)));
}

#[test]
fn discards_become_holes_in_the_file() {
    use std::os::unix::fs::MetadataExt as _;

    let remains = Remains::new();
    let process = remains.start();
    let all = vec![7; (PAGES * PAGE) as usize];
    process.holder.write(WORKER, 0, &all).unwrap();
    process.holder.flush(WORKER).unwrap();
    let blocks = || std::fs::metadata(process.disk.path()).unwrap().blocks() * 512;
    assert!(blocks() >= PAGES * PAGE);
    process.holder.discard(WORKER, 0, (PAGES - 1) * PAGE).unwrap();
    process.holder.flush(WORKER).unwrap();
    assert!((PAGE..8 * PAGE).contains(&blocks()), "{} bytes", blocks());
    assert!((0..PAGES - 1).all(|page| expect(&process, page, 0)));
    assert!(expect(&process, PAGES - 1, 7));
}

#[test]
fn pages_reach_the_file_although_nobody_asks() {
    let remains = Remains::new();
    let process = remains.start();
    process.holder.write(WORKER, 5 * PAGE, &[1; PAGE_SIZE]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while process.disk.in_ring() > Bytes::ZERO {
        assert!(Instant::now() < deadline, "the page stays in the ring");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(process.disk.stalled(), None);
    drop(process.writer);
    assert!(process.holder.write(WORKER, 0, &[1; PAGE_SIZE]).is_err(), "nobody writes it");
}
