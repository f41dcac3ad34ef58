//! Any order of writes, discards, deaths of lenders, moves and repairs: a page that was
//! acknowledged is read right, or is an error.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_page::{EXTENT_SIZE, LeaseId, WorkerId};
use aquifer_transport::Address;
use aquifer_transport::initiator::{InitiatorError, Outcome};
use aquifer_volume::holder::{Holder, HolderError};
use aquifer_volume::{Encryption, LeaseTarget, SecondCopy, Volume, VolumeConfig, VolumeError};
use proptest::prelude::*;

use crate::common::*;

const EXTENTS: u64 = 2;
/// Pages of each extent that the test uses.
const USED: u64 = 20;
/// Leases for first copies. A lease's second copy is on the one with 10 more.
const LEASES: u128 = 3;
const WORKER: WorkerId = WorkerId(0);

#[derive(Default)]
struct Memory {
    pages: BTreeMap<u64, Vec<u8>>,
    is_down: bool,
    /// Pages of writes until it dies in the middle of one.
    dies_after: Option<u64>,
}

#[derive(Clone, Default)]
struct Lender(Arc<Mutex<Memory>>);

impl Lender {
    fn with<T>(&self, what: impl FnOnce(&mut Memory) -> T) -> T {
        what(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn change(
        &self,
        pages: impl Iterator<Item = u64>,
        change: impl Fn(&mut Memory, u64),
    ) -> Result<(), HolderError> {
        self.with(|memory| {
            for page in pages {
                memory.is_down |= memory.dies_after == Some(0);
                memory.answer()?;
                memory.dies_after = memory.dies_after.map(|left| left - 1);
                change(memory, page);
            }
            Ok(())
        })
    }
}

impl Memory {
    fn answer(&self) -> Result<(), HolderError> {
        if !self.is_down {
            return Ok(());
        }
        let source = Box::new(InitiatorError::new("lender", Outcome::Ended, "it is down"));
        Err(HolderError::Unreachable { waited: Duration::MAX, source })
    }
}

impl Holder for Lender {
    fn read(&self, _: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.with(|memory| {
            memory.answer()?;
            for (page, into) in (offset / PAGE..).zip(into.chunks_mut(PAGE as usize)) {
                match memory.pages.get(&page) {
                    Some(data) => into.copy_from_slice(data),
                    None => into.fill(0),
                }
            }
            Ok(())
        })
    }

    fn write(&self, _: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        let (first, length) = (offset / PAGE, data.len() as u64 / PAGE);
        self.change(first..first + length, |memory, page| {
            let at = ((page - first) * PAGE) as usize;
            memory.pages.insert(page, data[at..at + PAGE as usize].to_vec());
        })
    }

    fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.with(|memory| memory.answer())?;
        let range = offset / PAGE..(offset + length) / PAGE;
        let some = self.with(|memory| memory.pages.range(range).map(|(page, _)| *page).collect());
        let some: Vec<u64> = some;
        self.change(some.into_iter(), |memory, page| _ = memory.pages.remove(&page))
    }

    fn flush(&self, _: WorkerId) -> Result<(), HolderError> {
        self.with(|memory| memory.answer())
    }

    fn unreachable_for(&self) -> Option<Duration> {
        self.with(|memory| memory.is_down.then_some(Duration::MAX))
    }
}

/// What happens next. Pages are numbers of pages in use; a lease is one of 1 to 3, and 11 to 13.
#[derive(Clone, Debug)]
enum Step {
    Write { page: u64, pages: u64, byte: u8 },
    Discard { page: u64, pages: u64 },
    Read { page: u64, pages: u64 },
    Die { lease: u128, after: Option<u64> },
    Return { lease: u128 },
    BeginCopy { of: u128, lags: bool },
    EndCopy { of: u128 },
    Move { lease: u128 },
    Scrub,
    Repair,
}

fn step() -> impl Strategy<Value = Step> {
    let (page, pages) = (0..EXTENTS * USED, 1..8_u64);
    let first = 1..=LEASES;
    let all = prop_oneof![first.clone(), 11..=10 + LEASES];
    prop_oneof![
        6 => (page.clone(), pages.clone(), 1..=255_u8)
            .prop_map(|(page, pages, byte)| Step::Write { page, pages, byte }),
        2 => (page.clone(), pages.clone()).prop_map(|(page, pages)| Step::Discard { page, pages }),
        5 => (page, pages).prop_map(|(page, pages)| Step::Read { page, pages }),
        3 => (all.clone(), prop::option::of(0..6_u64))
            .prop_map(|(lease, after)| Step::Die { lease, after }),
        4 => all.prop_map(|lease| Step::Return { lease }),
        3 => (first.clone(), any::<bool>())
            .prop_map(|(of, lags)| Step::BeginCopy { of, lags }),
        1 => first.clone().prop_map(|of| Step::EndCopy { of }),
        2 => first.prop_map(|lease| Step::Move { lease }),
        1 => Just(Step::Scrub),
        3 => Just(Step::Repair),
    ]
}

/// A volume over lenders, and what each page in use must be: a byte, or unknown after a change that
/// failed.
struct World {
    volume: Volume,
    lenders: BTreeMap<u128, Lender>,
    encryption: Encryption,
    known: Vec<Option<u8>>,
}

/// Returns where a page in use is in the volume.
fn offset(page: u64) -> u64 {
    page / USED * EXTENT_SIZE + page % USED * PAGE
}

impl World {
    fn new() -> Self {
        let config = VolumeConfig { io_timeout: Duration::ZERO, ..config(EXTENTS) };
        let world = Self {
            volume: Volume::new(config).unwrap(),
            lenders: (1..20).map(|lease| (lease, Lender::default())).collect(),
            encryption: Encryption::random(),
            known: vec![Some(0); (EXTENTS * USED) as usize],
        };
        (1..=LEASES).for_each(|lease| world.add_lease(lease));
        world
    }

    fn target(&self, lease: u128) -> LeaseTarget {
        let address = Address::Unix(format!("/{lease}").into());
        LeaseTarget {
            encryption: Some(self.encryption.clone()),
            ..lease_at(address, lease, EXTENTS)
        }
    }

    fn add_lease(&self, lease: u128) {
        let holder = Box::new(self.lenders[&lease].clone());
        let is_clean = self.lenders[&lease].with(|memory| memory.pages.is_empty());
        let added =
            self.volume.add_holder(self.target(lease), holder, EXTENTS as u32, |_| is_clean);
        added.unwrap();
    }

    /// Returns the runs of whole pages within one extent.
    fn runs(page: u64, pages: u64) -> impl Iterator<Item = u64> {
        page..(page + pages).min(EXTENTS * USED)
    }

    fn changed(&mut self, page: u64, done: &Result<(), VolumeError>, byte: u8) {
        self.known[page as usize] = done.is_ok().then_some(byte);
    }

    fn check(&self, page: u64, must_be_there: bool) {
        let mut data = [0xee; PAGE as usize];
        let read = self.volume.read(WORKER, offset(page), &mut data);
        match (read, self.known[page as usize]) {
            (Ok(()), Some(byte)) => assert!(data == [byte; PAGE as usize], "page {page}"),
            (Err(error), Some(_)) => assert!(!must_be_there, "page {page}: {error}"),
            (_, None) => {}
        }
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Write { page, pages, byte } => {
                for page in Self::runs(page, pages) {
                    let done = self.volume.write(WORKER, offset(page), &[byte; PAGE as usize]);
                    self.changed(page, &done, byte);
                }
            }
            Step::Discard { page, pages } => {
                for page in Self::runs(page, pages) {
                    let done = self.volume.discard(WORKER, offset(page), PAGE);
                    self.changed(page, &done, 0);
                }
            }
            Step::Read { page, pages } => {
                Self::runs(page, pages).for_each(|page| self.check(page, false));
            }
            Step::Die { lease, after } => self.lenders[&lease].with(|memory| {
                memory.is_down |= after.is_none();
                memory.dies_after = after;
            }),
            Step::Return { lease } => self.lenders[&lease].with(|memory| {
                (memory.is_down, memory.dies_after) = (false, None);
            }),
            Step::BeginCopy { of, lags } => {
                // A lease that the volume has given back would be new, and so empty.
                let holder = Box::new(self.lenders[&(of + 10)].clone());
                let copy = SecondCopy { of: LeaseId(of), lease: self.target(of + 10), lags };
                // It may have one.
                _ = self.volume.add_copy_holder(copy, holder, |_| Ok::<_, VolumeError>(()));
            }
            Step::EndCopy { of } => _ = self.volume.end_copy(LeaseId(of + 10)),
            Step::Move { lease } => {
                if self.volume.evacuate(LeaseId(lease), |_| ()).is_ok() {
                    self.add_lease(lease);
                }
            }
            Step::Scrub => _ = self.volume.scrub_copies(),
            Step::Repair => _ = self.volume.repair_copies(|| true),
        }
    }

    /// Brings all lenders back, which lose nothing, and reads all pages from either copy.
    fn end(&mut self) {
        for lender in self.lenders.values() {
            lender.with(|memory| (memory.is_down, memory.dies_after) = (false, None));
        }
        // The ring of a copy that lags behind may have yet to notice it.
        wait_until("all copies are whole", || self.volume.repair_copies(|| true));
        let all = 0..EXTENTS * USED;
        all.clone().for_each(|page| self.check(page, true));
        for dead in [0, 10] {
            let pairs = self.volume.copies();
            let of_pair = |lease: LeaseId| pairs.iter().any(|copy| copy.of == lease);
            for lease in (1..=LEASES).filter(|lease| of_pair(LeaseId(*lease))) {
                self.lenders[&(lease + dead)].with(|memory| memory.is_down = true);
            }
            all.clone().for_each(|page| self.check(page, true));
            self.lenders.values().for_each(|lender| lender.with(|memory| memory.is_down = false));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_page_of_a_pair_is_read_right_or_is_an_error(
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.play(step));
        world.end();
    }
}
