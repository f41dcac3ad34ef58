//! Any order of writes, discards, failures of the sink and ends of the process: a page that is read
//! is the newest one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::File;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_page::LeaseId;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::encryption::{Encryption, PageCipher};
use crate::holder::{FileHolder, VerifiedHolder, Wrong};
use crate::lock;
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

/// A file that takes no pages at times.
struct Flaky {
    file: FileHolder,
    is_broken: Arc<AtomicBool>,
    /// A page for which there is no room, plus one; 0 for none.
    refused: Arc<AtomicU64>,
    /// Held while it works on a write.
    working: Arc<Mutex<()>>,
    /// Counts attempts to change it.
    tries: Arc<AtomicU64>,
}

impl Flaky {
    fn may_change(&self) -> Result<(), HolderError> {
        self.tries.fetch_add(1, Ordering::SeqCst);
        drop(lock(&self.working));
        match self.is_broken.load(Ordering::SeqCst) {
            true => Err(HolderError::Full("no room".into())),
            false => Ok(()),
        }
    }
}

impl Holder for Flaky {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.file.read(worker, offset, into)
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.may_change()?;
        let pages = pages(offset, data.len() as u64);
        if pages.contains(&self.refused.load(Ordering::SeqCst).wrapping_sub(1)) {
            return Err(HolderError::Full("no room for this page".into()));
        }
        self.file.write(worker, offset, data)
    }

    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.may_change()?;
        self.file.discard(worker, offset, length)
    }

    fn flush(&self, worker: WorkerId) -> Result<(), HolderError> {
        self.file.flush(worker)
    }
}

/// A process with a lagging copy.
struct Process {
    writer: LagWriter,
    disk: LaggingHolder,
    is_broken: Arc<AtomicBool>,
    refused: Arc<AtomicU64>,
    working: Arc<Mutex<()>>,
    tries: Arc<AtomicU64>,
    /// What the owner was told: whether there was trouble.
    told: Arc<Mutex<Vec<bool>>>,
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

    fn path(&self) -> PathBuf {
        self.directory.path().join("copy")
    }

    fn start(&self) -> Process {
        let file = FileHolder::open(&self.path(), Bytes(PAGES * PAGE), 2).unwrap();
        let (is_broken, refused, working, tries, told) = Default::default();
        let sink = Flaky {
            file,
            is_broken: Arc::clone(&is_broken),
            refused: Arc::clone(&refused),
            working: Arc::clone(&working),
            tries: Arc::clone(&tries),
        };
        let log: Arc<Mutex<Vec<bool>>> = Arc::clone(&told);
        let tell = move |why: Option<&HolderError>| lock(&log).push(why.is_some());
        let lag = Lag { lag: Duration::from_millis(1), ..Lag::of_disk(Box::new(tell)) };
        let writer = LagWriter::start(Bytes(RING * PAGE), lag).unwrap();
        let tags = Arc::new(Tags::lagging(self.tags.clone()));
        let disk = writer.add(Box::new(sink), tags.clone(), (PAGES, WORKER));
        let cipher = PageCipher::new(&self.encryption, LeaseId(1));
        let holder = VerifiedHolder::new(Box::new(disk.clone()), Some(cipher), tags.clone(), 2);
        Process { writer, disk, is_broken, refused, working, tries, told, tags, holder }
    }
}

impl Process {
    fn break_sink(&self) {
        self.is_broken.store(true, Ordering::SeqCst);
    }

    /// Makes the sink take pages again, and waits until the thread knows.
    fn mend_sink(&self) {
        self.is_broken.store(false, Ordering::SeqCst);
        until("the sink takes pages again", || {
            self.disk.ring.retry();
            self.disk.trouble().is_none()
        });
    }
}

#[track_caller]
fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_true() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_micros(300));
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
    /// The sink takes no pages until it is mended.
    Break,
    Mend,
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
        1 => Just(Step::Break),
        2 => Just(Step::Mend),
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
                let done = process.holder.write(WORKER, page * PAGE, &data);
                let is_broken = process.is_broken.load(Ordering::SeqCst);
                assert!(done.is_ok() || is_broken, "{done:?}");
                for page in all {
                    newest[page as usize] = byte;
                    is_safe[page as usize] = done.is_ok();
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
            Step::Break => process.break_sink(),
            Step::Mend => process.mend_sink(),
            Step::Flush => {
                let done = process.holder.flush(WORKER);
                if process.is_broken.load(Ordering::SeqCst) && done.is_err() {
                    continue;
                }
                done.unwrap();
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
    let blocks = || std::fs::metadata(remains.path()).unwrap().blocks() * 512;
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
    until("the page leaves the ring", || process.disk.in_ring() == Bytes::ZERO);
    assert!(process.disk.trouble().is_none());
    drop(process.writer);
    assert!(process.holder.write(WORKER, 0, &[1; PAGE_SIZE]).is_err(), "nobody writes it");
}

#[test]
fn pages_stay_in_the_ring_while_the_sink_is_full() {
    let remains = Remains::new();
    let process = remains.start();
    process.break_sink();
    for page in 0..RING {
        process.holder.write(WORKER, page * PAGE, &[1; PAGE_SIZE]).unwrap();
    }
    until("this is told", || *lock(&process.told) == [true]);
    let refused = process.holder.write(WORKER, RING * PAGE, &[1; PAGE_SIZE]).unwrap_err();
    assert!(matches!(refused, HolderError::Full(_)), "{refused}");
    assert!(process.holder.flush(WORKER).is_err() && !process.disk.wait_for_half());
    // A page that is there already has room.
    process.holder.write(WORKER, 3 * PAGE, &[2; PAGE_SIZE]).unwrap();
    assert!(expect(&process, 0, 1) && expect(&process, 3, 2) && !expect(&process, RING, 1));
    process.mend_sink();
    process.holder.flush(WORKER).unwrap();
    assert_eq!(*lock(&process.told), [true, false]);
    drop(process);
    let next = remains.start();
    let newest = |page| if page == 3 { 2 } else { 1 };
    assert!((0..RING).all(|page| expect(&next, page, newest(page))));
    assert!(next.tags.is_unknown(RING));
}

#[test]
fn a_page_that_the_sink_refuses_holds_up_no_other() {
    let remains = Remains::new();
    let process = remains.start();
    process.refused.store(1 + 3, Ordering::SeqCst);
    // Far more than the ring holds.
    for round in 1..=3_u8 {
        for page in 0..PAGES {
            until("the page has room", || {
                process.disk.ring.retry();
                process.holder.write(WORKER, page * PAGE, &[round; PAGE_SIZE]).is_ok()
            });
        }
    }
    until("all others have arrived", || process.disk.in_ring() == Bytes(PAGE));
    assert!((0..PAGES).all(|page| expect(&process, page, 3)));
    assert!(process.disk.trouble().is_some() && process.holder.flush(WORKER).is_err());
    // It stands in the way of no repair.
    assert!(!process.disk.is_stalled() && process.disk.wait_for_half());
    assert_eq!(*lock(&process.told), [true]);
    process.refused.store(0, Ordering::SeqCst);
    process.mend_sink();
    assert_eq!(*lock(&process.told), [true, false]);
    process.holder.flush(WORKER).unwrap();
    drop(process);
    let next = remains.start();
    assert!((0..PAGES).all(|page| expect(&next, page, 3)));
}

#[test]
fn a_ring_that_became_empty_takes_pages_again() {
    let remains = Remains::new();
    let process = remains.start();
    process.break_sink();
    (0..RING).for_each(|page| {
        process.holder.write(WORKER, page * PAGE, &[1; PAGE_SIZE]).unwrap();
    });
    until("it stalls", || process.disk.is_stalled());
    // What the sink refused is not needed any longer.
    process.disk.leave();
    process.is_broken.store(false, Ordering::SeqCst);
    // The thread finds out by itself.
    until("the stall has ended", || process.disk.trouble().is_none());
    assert!(process.disk.wait_for_half());
}

#[test]
fn a_stalled_sink_rests_however_much_a_program_changes() {
    let remains = Remains::new();
    let process = remains.start();
    process.break_sink();
    (0..RING).for_each(|page| {
        process.holder.write(WORKER, page * PAGE, &[1; PAGE_SIZE]).unwrap();
    });
    until("it stalls", || process.disk.is_stalled());
    let (before, began) = (process.tries.load(Ordering::SeqCst), Instant::now());
    for page in (RING..PAGES).cycle().take(5000) {
        process.holder.write(WORKER, page * PAGE, &[2; PAGE_SIZE]).unwrap_err();
        process.holder.flush(WORKER).unwrap_err();
        process.holder.discard(WORKER, page * PAGE, PAGE).unwrap();
    }
    // A round each second tries a batch, each page of it, and a hole.
    let rounds = began.elapsed().as_secs() + 2;
    let tries = process.tries.load(Ordering::SeqCst) - before;
    assert!(tries <= rounds * (RING + 2), "{tries} tries in {rounds} rounds");
}

#[test]
fn a_sink_that_hangs_holds_up_only_its_own_copy() {
    let (one, other) = (Remains::new(), Remains::new());
    let (one, other) = (one.start(), other.start());
    let hangs = lock(&one.working);
    let write_all = |process: &Process, pages| {
        for page in 0..pages {
            process.holder.write(WORKER, page * PAGE, &[1; PAGE_SIZE]).unwrap();
        }
    };
    write_all(&one, RING);
    write_all(&other, PAGES);
    other.holder.flush(WORKER).unwrap();
    assert!((0..PAGES).all(|page| expect(&other, page, 1)));
    assert!((0..RING).all(|page| expect(&one, page, 1)));
    drop(hangs);
    one.holder.flush(WORKER).unwrap();
    assert!((0..RING).all(|page| expect(&one, page, 1)));
}
