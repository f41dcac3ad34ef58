//! Volumes that keep two copies of each page, and what is left when one lender dies or lies.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, LeaseId, WorkerId};
use aquifer_volume::{CopyStatus, Happening, SecondCopy, Upkeep, Volume, VolumeError};

use crate::common::*;

const PAGES: u64 = 300;

/// A volume with two copies of its one extent, on a lender each, and its upkeep.
struct Pair {
    volume: Arc<Volume>,
    lenders: [OurLender; 2],
    _upkeep: Upkeep,
}

impl Pair {
    /// Starts with a second copy that lags behind, or not.
    fn start(lags: bool) -> Self {
        let lenders = [OurLender::start(1), OurLender::start(1)];
        let volume = Arc::new(Volume::new(config(1)).unwrap());
        volume.add_lease(lenders[0].lease(1)).unwrap();
        // Pages from before the second copy are copied, too.
        (0..PAGES / 2).for_each(|page| write(&volume, page * PAGE, 1));
        add_copy(&volume, (&lenders[1], 3), lags).unwrap();
        let upkeep = Upkeep::start(&volume, |_| ()).unwrap();
        (PAGES / 2..PAGES).for_each(|page| write(&volume, page * PAGE, 1));
        let pair = Self { volume, lenders, _upkeep: upkeep };
        pair.is_whole();
        pair
    }

    fn status(&self) -> CopyStatus {
        self.volume.known_status().leases[0].copy.clone().unwrap()
    }

    #[track_caller]
    fn is_whole(&self) {
        wait_until("both copies are whole", || {
            let copy = self.status();
            copy.answer == (true, true)
                && (copy.lacks, copy.first_lacks) == (Bytes(0), Bytes(0))
                && copy.ring.is_none_or(|ring| ring.used == Bytes(0))
        });
    }

    #[track_caller]
    fn expect_all(&self, round: u64) {
        (0..PAGES).for_each(|page| expect(&self.volume, page * PAGE, round));
    }
}

fn add_copy(
    volume: &Volume,
    (lender, number): (&OurLender, u128),
    lags: bool,
) -> Result<(), VolumeError> {
    let copy = SecondCopy { of: LeaseId(1), lease: lender.lease(number), lags };
    volume.add_copy(copy, |_| Ok(()))
}

#[test]
fn a_dead_lender_loses_nothing_and_is_repaired_when_it_is_back() {
    for lags in [false, true] {
        for dead in [0, 1] {
            let mut pair = Pair::start(lags);
            pair.lenders[dead].kill();
            pair.expect_all(1);
            (0..PAGES).step_by(2).for_each(|page| write(&pair.volume, page * PAGE, 2));
            pair.volume.discard(WorkerId(0), 101 * PAGE, PAGE).unwrap();
            let expect_all = |volume: &Volume| {
                for page in (0..PAGES).filter(|page| *page != 101) {
                    expect(volume, page * PAGE, if page % 2 == 0 { 2 } else { 1 });
                }
                expect_zeroes(volume, 101 * PAGE);
            };
            expect_all(&pair.volume);
            let copy = pair.status();
            let missed = if dead == 0 { copy.first_lacks } else { copy.lacks };
            assert!(missed >= Bytes(PAGES / 2 * PAGE), "{copy:?}");
            assert_eq!(pair.volume.relies_on_copy(false).is_some(), dead == 0);
            // It comes back stale: with the pages as they were when it died.
            pair.lenders[dead].restart();
            pair.is_whole();
            let told = |what: &Happening| matches!(what, Happening::CopiesWhole { .. });
            wait_until("this is told", || {
                let events = pair.volume.events_after(0);
                events.iter().filter(|event| told(&event.what)).count() >= 2
            });
            pair.lenders[1 - dead].kill();
            expect_all(&pair.volume);
        }
    }
}

#[test]
fn a_lender_that_comes_back_empty_is_not_believed() {
    for lags in [false, true] {
        for dead in [0, 1] {
            let mut pair = Pair::start(lags);
            pair.lenders[dead].kill();
            pair.lenders[dead].restart_empty();
            pair.expect_all(1);
            (0..PAGES).for_each(|page| write(&pair.volume, page * PAGE, 2));
            pair.expect_all(2);
            let (first, second) = pair.status().answer;
            assert!(![first, second][dead] && [first, second][1 - dead]);
        }
    }
}

#[test]
fn a_silent_lender_holds_nobody_up_for_long() {
    for lags in [false, true] {
        for silent in [0, 1] {
            let pair = Pair::start(lags);
            pair.lenders[silent].freeze();
            let begun = Instant::now();
            pair.expect_all(1);
            (0..PAGES).for_each(|page| write(&pair.volume, page * PAGE, 2));
            // The volume's timeout is 20 s. Far less is a matter of measurement, not of tests.
            assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
            pair.expect_all(2);
            pair.lenders[silent].thaw();
            pair.is_whole();
            pair.expect_all(2);
        }
    }
}

#[test]
fn a_page_comes_from_the_other_lender_if_one_is_late() {
    for lags in [false, true] {
        for late in [0, 1] {
            let pair = Pair::start(lags);
            wait_until("a read asks both", || {
                pair.lenders[late].freeze();
                pair.expect_all(1);
                pair.lenders[late].thaw();
                pair.status().late_reads > 0
            });
            // The late answers disturb nothing.
            (0..PAGES).for_each(|page| write(&pair.volume, page * PAGE, 2));
            pair.expect_all(2);
            pair.is_whole();
        }
    }
}

#[test]
fn a_page_that_one_lender_changed_comes_from_the_other() {
    for lags in [false, true] {
        let pair = Pair::start(lags);
        let store = pair.lenders[0].file();
        let mut all = fs::read(&store).unwrap();
        all[7 * 4096 + 5] ^= 1;
        all[8 * 4096..9 * 4096].fill(0);
        all.copy_within(20 * 4096..21 * 4096, 21 * 4096);
        fs::write(&store, &all).unwrap();
        pair.expect_all(1);
        let mut many = vec![0; 64 * 4096];
        pair.volume.read(WorkerId(1), 0, &mut many).unwrap();
        // Reads may have gone to the other lender, which was faster lately.
        (0..PAGES).for_each(|_| _ = pair.volume.scrub_copies());
        let behind = |what: &Happening| match what {
            Happening::CopyBehind { lease: LeaseId(1), why, .. } => why.contains("it returned"),
            _ => false,
        };
        assert!(pair.volume.events_after(0).iter().any(|event| behind(&event.what)));
        pair.is_whole();
        // The first lender has the right pages again: the second is not needed for them.
        pair.lenders[1].freeze();
        pair.expect_all(1);
        pair.lenders[1].thaw();
    }
}

#[test]
fn with_both_lenders_dead_pages_are_errors_and_come_back() {
    for lags in [false, true] {
        let mut pair = Pair::start(lags);
        pair.lenders.iter_mut().for_each(OurLender::kill);
        let begun = Instant::now();
        thread::scope(|threads| {
            let volume = &pair.volume;
            let reader = threads.spawn(|| volume.read(WorkerId(1), 0, &mut [0; 4096]));
            let writer = threads.spawn(|| volume.write(WorkerId(2), PAGE, &content(PAGE, 2)));
            let ended = [reader.join().unwrap(), writer.join().unwrap()];
            assert!(ended.iter().all(Result::is_err), "{ended:?}");
        });
        // They wait as long as for the one lender of pages without a second copy.
        assert!(begun.elapsed() >= TIMEOUT, "{:?}", begun.elapsed());
        pair.lenders.iter_mut().for_each(OurLender::restart);
        wait_until("the pages are there again", || {
            pair.volume.read(WorkerId(1), 0, &mut [0; 4096]).is_ok()
        });
        write(&pair.volume, PAGE, 1);
        pair.is_whole();
        pair.expect_all(1);
    }
}

#[test]
fn a_pair_moves_to_another_lease_and_a_copy_can_end() {
    for lags in [false, true] {
        let mut pair = Pair::start(lags);
        assert!(matches!(
            add_copy(&pair.volume, (&pair.lenders[1], 3), lags),
            Err(VolumeError::LeaseInUse(..))
        ));
        pair.lenders[0].kill();
        pair.expect_all(1);
        // The way to repair what a dead lender leaves: another lease takes it all over.
        let third = OurLender::start(1);
        pair.volume.add_lease(third.lease(5)).unwrap();
        pair.volume.evacuate(LeaseId(1), |_| ()).unwrap();
        pair.expect_all(1);
        assert!(pair.volume.copies().is_empty());
        let copy = SecondCopy { of: LeaseId(5), lease: pair.lenders[1].lease(7), lags };
        pair.volume.add_copy(copy, |_| Ok::<_, VolumeError>(())).unwrap();
        wait_until("the new copy is whole", || {
            let status = pair.volume.known_status();
            status.leases[0].copy.as_ref().is_some_and(|copy| copy.lacks == Bytes(0))
        });
        pair.volume.empty_copies();
        assert!(pair.volume.known_status().leases[0].copy.is_none());
        pair.lenders[1].kill();
        thread::sleep(Duration::from_millis(50));
        pair.expect_all(1);
        (0..PAGES).for_each(|page| write(&pair.volume, page * PAGE, 3));
        pair.expect_all(3);
    }
}

#[test]
fn a_dead_lender_is_noticed_although_no_program_reads() {
    for lags in [false, true] {
        for dead in [0, 1] {
            let mut pair = Pair::start(lags);
            pair.lenders[dead].kill();
            wait_until("the volume notices it", || {
                let (first, second) = pair.status().answer;
                ![first, second][dead] && [first, second][1 - dead]
            });
            pair.expect_all(1);
        }
    }
}

#[test]
fn a_copy_does_not_end_while_the_first_lender_is_dead_or_empty() {
    for lags in [false, true] {
        for is_back in [false, true] {
            let mut pair = Pair::start(lags);
            // Nobody has noticed it yet.
            pair.lenders[0].kill();
            if is_back {
                pair.lenders[0].restart_empty();
            }
            let refused = pair.volume.end_copy(LeaseId(3)).unwrap_err();
            assert!(matches!(refused, VolumeError::OnlyCopy { .. }), "{refused}");
            pair.expect_all(1);
        }
        let mut pair = Pair::start(lags);
        pair.volume.end_copy(LeaseId(3)).unwrap();
        pair.lenders[1].kill();
        pair.expect_all(1);
        assert!(pair.volume.known_status().leases[0].copy.is_none());
    }
}

#[test]
fn a_changed_page_is_found_although_no_program_reads_it() {
    for lags in [false, true] {
        for liar in [0, 1] {
            let pair = Pair::start(lags);
            let store = pair.lenders[liar].file();
            let mut all = fs::read(&store).unwrap();
            all[20 * 4096 + 5] ^= 1;
            fs::write(&store, &all).unwrap();
            let is_told = |what: &Happening| match what {
                Happening::CopyBehind { why, .. } => why.contains("it returned"),
                _ => false,
            };
            wait_until("the volume finds it", || {
                pair.volume.events_after(0).iter().any(|event| is_told(&event.what))
            });
            pair.is_whole();
            pair.lenders[1 - liar].freeze();
            expect(&pair.volume, 20 * PAGE, 1);
            pair.lenders[1 - liar].thaw();
        }
    }
}
