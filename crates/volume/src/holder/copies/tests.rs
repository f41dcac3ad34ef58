//! Any order of changes, deaths, lies and repairs: a page that was acknowledged is read right, or
//! is an error.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::VecDeque;
use std::sync::Mutex;

use aquifer_page::LeaseId;
use proptest::prelude::*;

use super::repair::RUN;
use super::*;
use crate::encryption::{Encryption, PageCipher};
use crate::holder::{DiskFile, FileHolder, Lag, LagWriter, VerifiedHolder};
use crate::lock;

const PAGES: u64 = 160;
const WORKER: WorkerId = WorkerId(0);

/// The memory of a lender that dies and lies.
#[derive(Default)]
struct Memory {
    bytes: Vec<u8>,
    /// Earlier contents of all pages, for replays.
    old: VecDeque<Vec<u8>>,
    is_down: bool,
    /// Reads of a page come late.
    is_late: bool,
    /// When somebody first noticed that it is down.
    away_since: Option<Instant>,
    /// The number of pages of writes until it dies in the middle of one.
    dies_after: Option<u64>,
}

#[derive(Clone)]
struct Lender(Arc<Mutex<Memory>>);

impl Lender {
    fn new() -> Self {
        let bytes = vec![0; (PAGES * PAGE) as usize];
        Self(Arc::new(Mutex::new(Memory { bytes, ..Memory::default() })))
    }

    fn away() -> HolderError {
        let source = Box::new(InitiatorError::new("lender", Outcome::Ended, "it is down"));
        HolderError::Unreachable { waited: Duration::ZERO, source }
    }

    /// Changes pages one after the other; any part is done when the lender dies.
    fn change(&self, offset: u64, length: usize, change: impl Fn(&mut [u8], usize)) -> Done {
        let memory = &mut *lock(&self.0);
        for at in (0..length).step_by(PAGE_SIZE) {
            if memory.dies_after == Some(0) {
                (memory.dies_after, memory.is_down) = (None, true);
            }
            if memory.is_down {
                return Err(Self::away());
            }
            memory.dies_after = memory.dies_after.map(|left| left - 1);
            let end = (at + PAGE_SIZE).min(length);
            change(&mut memory.bytes[offset as usize + at..offset as usize + end], at);
        }
        Ok(())
    }
}

impl Holder for Lender {
    fn read(&self, _: WorkerId, offset: u64, into: &mut [u8]) -> Done {
        let memory = lock(&self.0);
        if memory.is_down {
            return Err(Self::away());
        }
        into.copy_from_slice(&memory.bytes[offset as usize..][..into.len()]);
        Ok(())
    }

    fn read_soon(&self, worker: WorkerId, at: u64, into: &mut [u8], _: Duration) -> SoonDone {
        if lock(&self.0).is_late {
            into.fill(0xdd);
            return Ok(false);
        }
        self.read(worker, at, into).map(|()| true)
    }

    fn write(&self, _: WorkerId, offset: u64, data: &[u8]) -> Done {
        self.change(offset, data.len(), |into, at| into.copy_from_slice(&data[at..at + into.len()]))
    }

    /// Does the writes before or after the other work.
    fn write_while(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        _: &[u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Done {
        let is_first = pieces.len() % 2 == 1;
        if is_first {
            meanwhile();
        }
        let done = self.write_many(worker, pieces);
        meanwhile();
        done
    }

    fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Done {
        self.change(offset, length as usize, |into, _| into.fill(0))
    }

    fn flush(&self, _: WorkerId) -> Done {
        Ok(())
    }

    fn unreachable_for(&self) -> Option<Duration> {
        let memory = &mut *lock(&self.0);
        let since = memory.away_since.take().unwrap_or_else(Instant::now);
        memory.away_since = memory.is_down.then_some(since);
        memory.away_since.map(|since| since.elapsed())
    }
}

fn copy(lender: &Lender, encryption: Option<&Encryption>, tags: Tags) -> Copy {
    let cipher = encryption.map(|encryption| PageCipher::new(encryption, LeaseId(1)));
    let tags = Arc::new(tags);
    let holder = VerifiedHolder::new(Box::new(lender.clone()), cipher, tags.clone(), 4);
    Copy::new(None, holder, tags)
}

/// What holds the second copy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// A lender, with the cipher of the first one.
    SharedCipher,
    /// A lender, without encryption.
    OwnCipher,
    /// A lender, a moment later.
    Lagging,
    /// This host's disk.
    Disk,
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::SharedCipher),
        Just(Kind::OwnCipher),
        Just(Kind::Lagging),
        Just(Kind::Disk)
    ]
}

/// A ring that is nearly always full.
fn ring() -> LagWriter {
    let lag = Lag { lag: Duration::from_micros(200), ..Lag::of_lender(Box::new(|_| ())) };
    LagWriter::start(Bytes(16 * PAGE), lag).unwrap()
}

/// Two copies, of which the second is new, so it lacks all pages. Copies on a disk end with the
/// writer.
fn pair(lenders: &[Lender; 2], io_timeout: Duration, kind: Kind) -> (Copies, Option<LagWriter>) {
    let encryption = Encryption::random();
    let copies = Copies::one(copy(&lenders[0], Some(&encryption), Tags::new(PAGES)));
    let tags = Tags::new(PAGES);
    tags.forget_all();
    let of_volume = (io_timeout, Arc::default());
    let second = |copy| Second::new(copy, kind != Kind::OwnCipher, of_volume);
    let lagging = |holder: LaggingHolder, tags: Arc<Tags>| {
        let cipher = PageCipher::new(&encryption, LeaseId(1));
        let verified = Box::new(holder.clone());
        let verified = VerifiedHolder::new(verified, Some(cipher), tags.clone(), 4);
        (Some(holder), Copy::new(None, verified, tags))
    };
    let mut writer = None;
    let second = match kind {
        Kind::SharedCipher => second(copy(&lenders[1], Some(&encryption), tags)),
        Kind::OwnCipher => second(copy(&lenders[1], None, tags)),
        Kind::Lagging => {
            let tags = Arc::new(tags);
            let holder = ring().alone(Box::new(lenders[1].clone()), tags.clone(), (PAGES, WORKER));
            let (lagging, copy) = lagging(holder, tags);
            Second { lagging, ..second(copy) }
        }
        Kind::Disk => {
            let size = Bytes(PAGES * PAGE);
            let file = FileHolder::create(&std::env::temp_dir(), size, 4).unwrap();
            let (ring, tags) = (writer.insert(ring()), Arc::new(tags));
            let (lagging, copy) =
                lagging(ring.add(Box::new(file), tags.clone(), (PAGES, WORKER)), tags);
            let file = Some(DiskFile { id: LeaseId(2), path: "/".into() });
            Second { lagging, file, ..second(copy) }
        }
    };
    copies.begin_second(Arc::new(second));
    (copies, writer)
}

fn repair(copies: &Copies) -> bool {
    let mut buffer = vec![0; (RUN * PAGE) as usize];
    matches!(copies.repair(WORKER, iter::once(0..PAGES), &mut buffer, || true), Ok(true))
}

#[test]
fn a_repair_keeps_to_the_order_that_it_is_given() {
    let lenders = [Lender::new(), Lender::new()];
    let (copies, _) = pair(&lenders, Duration::ZERO, Kind::SharedCipher);
    lock(&lenders[1].0).is_down = true;
    copies.write(WORKER, 0, &vec![1; (PAGES * PAGE) as usize]).unwrap();
    lock(&lenders[1].0).is_down = false;
    let mut buffer = vec![0; (RUN * PAGE) as usize];
    let order = [100..PAGES, 0..100];
    assert!(!copies.repair(WORKER, order.clone(), &mut buffer, || false).unwrap());
    let lacking = |pages: Range<u64>| copies.missing(pages, false).1;
    assert_eq!((lacking(100..PAGES), lacking(0..100)), (Bytes::ZERO, Bytes(100 * PAGE)));
    assert!(copies.repair(WORKER, order, &mut buffer, || true).unwrap());
    assert_eq!(lacking(0..PAGES), Bytes::ZERO);
}

/// Repairs until both copies are whole. The lenders answer, but a ring may have to notice that.
fn repair_all(copies: &Copies) {
    let begun = Instant::now();
    while !repair(copies) {
        assert!(begun.elapsed() < Duration::from_secs(20), "both lenders are there");
        thread::sleep(Duration::from_micros(200));
    }
}

/// What happens next. Numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Write {
        at: u64,
        length: u64,
        byte: u8,
    },
    WriteMany {
        first: u64,
        second: u64,
        byte: u8,
    },
    Discard {
        page: u64,
        pages: u64,
    },
    Read {
        at: u64,
        length: u64,
    },
    Die {
        lender: usize,
        after: Option<u64>,
    },
    Return {
        lender: usize,
    },
    Flip {
        lender: usize,
        at: u64,
    },
    Swap {
        lender: usize,
        one: u64,
        other: u64,
    },
    Keep {
        lender: usize,
    },
    /// Reads of this lender take long lately.
    Slow {
        lender: usize,
    },
    /// Reads of this lender come late from now on, or no longer.
    Late {
        lender: usize,
    },
    Replay {
        lender: usize,
        page: u64,
    },
    Repair,
}

fn step() -> impl Strategy<Value = Step> {
    let size = PAGES * PAGE;
    let (page, lender) = (0..PAGES, 0..2_usize);
    prop_oneof![
        6 => (0..size, 1..6 * PAGE, 1..=255_u8)
            .prop_map(|(at, length, byte)| Step::Write { at, length, byte }),
        // Whole pages, also more than a worker encrypts at a time.
        3 => (page.clone(), prop_oneof![1..6_u64, 60..150_u64], 1..=255_u8)
            .prop_map(|(page, pages, byte)| {
                Step::Write { at: page * PAGE, length: pages * PAGE, byte }
            }),
        2 => (page.clone(), page.clone(), 1..=255_u8)
            .prop_map(|(first, second, byte)| Step::WriteMany { first, second, byte }),
        2 => (page.clone(), 1..40_u64).prop_map(|(page, pages)| Step::Discard { page, pages }),
        6 => (0..size, 1..8 * PAGE).prop_map(|(at, length)| Step::Read { at, length }),
        6 => page.clone().prop_map(|page| Step::Read { at: page * PAGE, length: PAGE }),
        2 => (lender.clone(), prop::option::of(0..6_u64))
            .prop_map(|(lender, after)| Step::Die { lender, after }),
        3 => lender.clone().prop_map(|lender| Step::Return { lender }),
        1 => (lender.clone(), 0..size).prop_map(|(lender, at)| Step::Flip { lender, at }),
        1 => (lender.clone(), page.clone(), page.clone())
            .prop_map(|(lender, one, other)| Step::Swap { lender, one, other }),
        1 => lender.clone().prop_map(|lender| Step::Keep { lender }),
        1 => lender.clone().prop_map(|lender| Step::Slow { lender }),
        1 => lender.clone().prop_map(|lender| Step::Late { lender }),
        1 => (lender, page).prop_map(|(lender, page)| Step::Replay { lender, page }),
        3 => Just(Step::Repair),
    ]
}

/// What each page must be: its bytes, or unknown after a failed change.
struct Model(Vec<Option<Vec<u8>>>);

impl Model {
    fn changed(&mut self, bytes: &Range<u64>, done: &Done, change: impl Fn(&mut [u8])) {
        for page in touched(bytes) {
            let known = &mut self.0[page as usize];
            let (start, end) = (bytes.start.max(page * PAGE), bytes.end.min((page + 1) * PAGE));
            let whole = end - start == PAGE;
            match (done, &mut *known) {
                (Ok(()), Some(data)) => {
                    let start = (start - page * PAGE) as usize;
                    let end = (end - page * PAGE) as usize;
                    change(&mut data[start..end]);
                }
                (Ok(()), None) if whole => {
                    let mut data = vec![0; PAGE_SIZE];
                    change(&mut data);
                    *known = Some(data);
                }
                // Of a page that nobody knows, a change of a part leaves the rest unknown.
                (Ok(()), None) => {}
                (Err(_), _) => *known = None,
            }
        }
    }

    fn expect(&self, at: u64, data: &[u8]) {
        for (byte, is) in (at..).zip(data) {
            let known = self.0[(byte / PAGE) as usize].as_ref();
            // A change that failed may have been done, and a later repair may have found it.
            if let Some(known) = known {
                assert_eq!(known[(byte % PAGE) as usize], *is, "byte {byte}");
            }
        }
    }
}

fn play(steps: Vec<Step>, kind: Kind) {
    let lenders = [Lender::new(), Lender::new()];
    let (copies, _writer) = pair(&lenders, Duration::ZERO, kind);
    let mut model = Model((0..PAGES).map(|_| Some(vec![0; PAGE_SIZE])).collect());
    let mut was_lied_to = false;
    let size = PAGES * PAGE;
    for step in steps {
        match step {
            Step::Write { at, length, byte } => {
                let bytes = at..(at + length).min(size);
                let data = vec![byte; (bytes.end - bytes.start) as usize];
                let done = copies.write(WORKER, at, &data);
                model.changed(&bytes, &done, |into| into.fill(byte));
            }
            Step::WriteMany { first, second, byte } => {
                let data = [byte; PAGE_SIZE];
                let pieces = [(first * PAGE, &data[..]), (second * PAGE, &data[..])];
                let done = copies.write_many(WORKER, &pieces);
                for page in [first, second] {
                    let bytes = page * PAGE..(page + 1) * PAGE;
                    model.changed(&bytes, &done, |into| into.fill(byte));
                }
            }
            Step::Discard { page, pages } => {
                let bytes = page * PAGE..(page + pages).min(PAGES) * PAGE;
                let done = copies.discard(WORKER, bytes.start, bytes.end - bytes.start);
                model.changed(&bytes, &done, |into| into.fill(0));
            }
            Step::Read { at, length } => {
                let mut data = vec![0xee; length.min(size - at) as usize];
                let read = copies.read(WORKER, at, &mut data);
                if read.is_ok() {
                    model.expect(at, &data);
                }
            }
            Step::Die { lender, after } => {
                let memory = &mut *lock(&lenders[lender].0);
                memory.is_down |= after.is_none();
                memory.dies_after = after;
            }
            Step::Return { lender } => {
                let memory = &mut *lock(&lenders[lender].0);
                (memory.is_down, memory.dies_after) = (false, None);
            }
            Step::Flip { lender, at } => {
                was_lied_to = true;
                lock(&lenders[lender].0).bytes[at as usize] ^= 0x10;
            }
            Step::Swap { lender, one, other } => {
                was_lied_to = true;
                let bytes = &mut lock(&lenders[lender].0).bytes;
                let (one, other) = ((one * PAGE) as usize, (other * PAGE) as usize);
                let first = bytes[one..][..PAGE_SIZE].to_vec();
                bytes.copy_within(other..other + PAGE_SIZE, one);
                bytes[other..][..PAGE_SIZE].copy_from_slice(&first);
            }
            Step::Keep { lender } => {
                let memory = &mut *lock(&lenders[lender].0);
                memory.old.push_back(memory.bytes.clone());
            }
            Step::Replay { lender, page } => {
                let memory = &mut *lock(&lenders[lender].0);
                let Some(old) = memory.old.pop_front() else { continue };
                was_lied_to = true;
                let at = (page * PAGE) as usize;
                memory.bytes[at..][..PAGE_SIZE].copy_from_slice(&old[at..][..PAGE_SIZE]);
            }
            Step::Slow { lender } => {
                let second = copies.second().unwrap();
                let pace = [&copies.first.pace, &second.copy.pace][lender];
                (0..50).for_each(|_| pace.note(Duration::from_millis(50)));
            }
            Step::Late { lender } => {
                let memory = &mut *lock(&lenders[lender].0);
                memory.is_late = !memory.is_late;
            }
            Step::Repair => _ = repair(&copies),
        }
    }
    // Lenders that were only away lose nothing.
    for lender in &lenders {
        let memory = &mut *lock(&lender.0);
        (memory.is_down, memory.dies_after) = (false, None);
    }
    if was_lied_to {
        return;
    }
    repair_all(&copies);
    for page in 0..PAGES {
        let mut data = vec![0; PAGE_SIZE];
        let read = copies.read(WORKER, page * PAGE, &mut data);
        assert!(read.is_ok() || model.0[page as usize].is_none(), "page {page}: {read:?}");
        if read.is_ok() {
            model.expect(page * PAGE, &data);
        }
        let copies = (copies.first.tags.of(page..page + 1), copies.second().unwrap());
        let second = copies.1.copy.tags.of(page..page + 1);
        let unknown = (copies.0[0] >= u64::MAX - 1, second[0] >= u64::MAX - 1);
        assert_eq!(unknown.0, unknown.1, "page {page} is not in both copies");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_acknowledged_page_is_read_right_or_is_an_error(
        steps in prop::collection::vec(step(), 1..120),
        kind in kind(),
    ) {
        play(steps, kind);
    }
}

#[test]
fn threads_that_write_while_lenders_come_and_go_lose_nothing() {
    [Kind::SharedCipher, Kind::Lagging, Kind::Disk].into_iter().for_each(threads_lose_nothing);
}

fn threads_lose_nothing(kind: Kind) {
    const THREADS: u64 = 3;
    let lenders = [Lender::new(), Lender::new()];
    let (copies, _writer) = pair(&lenders, Duration::from_secs(20), kind);
    let last: Vec<_> = thread::scope(|threads| {
        let writers: Vec<_> = (0..THREADS)
            .map(|number| {
                let copies = &copies;
                threads.spawn(move || {
                    let mut last = vec![0; PAGES as usize];
                    let own: Vec<_> = (0..PAGES).filter(|page| page % THREADS == number).collect();
                    for turn in 0..120_u64 {
                        for page in own.iter().filter(|page| (*page + turn).is_multiple_of(7)) {
                            let byte = (turn % 255 + 1) as u8;
                            let worker = WorkerId(number as usize);
                            copies.write(worker, page * PAGE, &[byte; PAGE_SIZE]).unwrap();
                            last[*page as usize] = byte;
                        }
                    }
                    (own, last)
                })
            })
            .collect();
        let repairer = threads.spawn(|| {
            for turn in 0..60 {
                // Never both: then writes would fail.
                let dead = &lenders[turn % 2];
                lock(&dead.0).is_down = true;
                thread::sleep(Duration::from_micros(300));
                lock(&dead.0).is_down = false;
                repair(&copies);
            }
        });
        repairer.join().unwrap();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    repair_all(&copies);
    for dead in [0, 1] {
        lock(&lenders[dead].0).is_down = true;
        for (own, last) in &last {
            for page in own {
                let mut data = [0xee; PAGE_SIZE];
                copies.read(WORKER, page * PAGE, &mut data).unwrap();
                assert!(data == [last[*page as usize]; PAGE_SIZE], "page {page}");
            }
        }
        lock(&lenders[dead].0).is_down = false;
    }
}

#[test]
fn only_the_first_operations_wait_while_both_lenders_are_away() {
    let lenders = [Lender::new(), Lender::new()];
    let timeout = Duration::from_secs(1);
    let (copies, _) = pair(&lenders, timeout, Kind::SharedCipher);
    copies.write(WORKER, 0, &[1; PAGE_SIZE]).unwrap();
    lenders.iter().for_each(|lender| lock(&lender.0).is_down = true);
    let begun = Instant::now();
    for _ in 0..100 {
        let read = copies.read(WORKER, 0, &mut [0; PAGE_SIZE]);
        assert!(matches!(read, Err(HolderError::Unreachable { .. })), "{read:?}");
    }
    // If each read waited, they would take twice as long as this.
    assert!((timeout..50 * timeout).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    lock(&lenders[1].0).is_down = false;
    let mut page = [0; PAGE_SIZE];
    copies.read(WORKER, 0, &mut page).unwrap();
    assert_eq!(page, [1; PAGE_SIZE]);
}
