//! Lenders that return other pages than the volume stored, and writes that meet in one page.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, ExtentIndex, LeaseId, WorkerId};
use aquifer_transport::Address;
use aquifer_volume::holder::FileHolder;
use aquifer_volume::{
    Encryption, EncryptionMode, Happening, LeaseState, LeaseTarget, Volume, VolumeConfig,
};

use crate::common::*;

/// A lender's memory that a test can change: a file.
struct Glass {
    file: File,
    target: LeaseTarget,
}

impl Glass {
    /// Adds a lease of so many extents to the volume.
    fn join(volume: &Volume, dir: &Path, number: u128, extents: u64, mode: Mode) -> Self {
        let path = dir.join(number.to_string());
        File::create(&path).unwrap().set_len(extents * EXTENT_SIZE).unwrap();
        let mode = match mode {
            Mode::Plain => None,
            Mode::Random => Some(EncryptionMode::Random),
            Mode::Deterministic => Some(EncryptionMode::Deterministic),
        };
        let encryption = mode.map(|mode| Encryption { mode, ..Encryption::random() });
        let target =
            LeaseTarget { encryption, ..lease_at(Address::Unix(path.clone()), number, extents) };
        let holder = FileHolder::open(&path, Bytes(extents * EXTENT_SIZE), 5).unwrap();
        volume.add_holder(target.clone(), Box::new(holder), extents as u32, |_| true).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { file, target }
    }

    fn page(&self, number: u64) -> [u8; 4096] {
        let mut page = [0; 4096];
        self.file.read_exact_at(&mut page, number * PAGE).unwrap();
        page
    }

    fn put(&self, number: u64, page: &[u8]) {
        self.file.write_all_at(page, number * PAGE).unwrap();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Plain,
    Random,
    Deterministic,
}

const MODES: [Mode; 3] = [Mode::Plain, Mode::Random, Mode::Deterministic];

#[test]
fn each_lie_is_an_error_that_names_lender_lease_and_page() {
    for mode in MODES {
        let dir = tempfile::tempdir().unwrap();
        let volume = Volume::new(config(1)).unwrap();
        let glass = Glass::join(&volume, dir.path(), 7, 1, mode);
        (0..64).for_each(|page| write(&volume, page * PAGE, 1));
        let old: Vec<_> = (0..64).map(|page| glass.page(page)).collect();
        (0..64).for_each(|page| write(&volume, page * PAGE, 2));
        let mut flipped = glass.page(3);
        flipped[4095] ^= 0x80;
        glass.put(3, &flipped);
        glass.put(9, &[0; 4096]);
        let (one, other) = (glass.page(20), glass.page(21));
        glass.put(20, &other);
        glass.put(21, &one);
        glass.put(40, &old[40]);
        // Page 100 was never written: the volume asks for it only beside others.
        glass.put(100, &old[0]);
        write(&volume, 101 * PAGE, 1);
        write(&volume, 99 * PAGE, 1);
        for page in [3, 9, 20, 21, 40] {
            let error = volume.read(WorkerId(0), page * PAGE, &mut [0; 4096]).unwrap_err();
            assert!(error.is_lost(), "{mode:?}: {error}");
            let lease = format!("lease {:032x}", glass.target.lease.0);
            for part in ["lender lender-7", &lease, &format!("page {page}:"), "it returned"] {
                assert!(error.to_string().contains(part), "{mode:?}: {error}");
            }
        }
        volume.read(WorkerId(0), 99 * PAGE, &mut [0; 3 * 4096]).unwrap_err();
        expect_zeroes(&volume, 100 * PAGE);
        for page in (0..64).filter(|page| ![3, 9, 20, 21, 40].contains(page)) {
            expect(&volume, page * PAGE, 2);
        }
        let status = volume.status();
        assert_eq!(status.leases[0].state, LeaseState::Lost, "{mode:?}");
        let told = |what: &Happening| matches!(what, Happening::LenderLost { .. });
        assert_eq!(status.events.iter().filter(|event| told(&event.what)).count(), 1);
        // A page that is written again is right again.
        write(&volume, 3 * PAGE, 5);
        expect(&volume, 3 * PAGE, 5);
    }
}

#[test]
fn a_move_takes_no_lie_along() {
    for mode in MODES {
        let dir = tempfile::tempdir().unwrap();
        let volume = Volume::new(config(1)).unwrap();
        let from = Glass::join(&volume, dir.path(), 1, 1, mode);
        (0..600).for_each(|page| write(&volume, page * PAGE, 1));
        let right = from.page(300);
        from.put(300, &from.page(301));
        let to = Glass::join(&volume, dir.path(), 2, 1, mode);
        let error = volume.evacuate(LeaseId(1), |_| ()).unwrap_err().to_string();
        assert!(error.contains("lender lender-1") && error.contains("it returned"), "{error}");
        (0..600).filter(|page| *page != 300).for_each(|page| expect(&volume, page * PAGE, 1));
        // The lender was mistaken: it has the page after all.
        from.put(300, &right);
        volume.evacuate(LeaseId(1), |_| ()).unwrap();
        (0..600).for_each(|page| expect(&volume, page * PAGE, 1));
        assert_eq!(placed(&volume), [1]);
        to.put(5, &to.page(6));
        volume.read(WorkerId(0), 5 * PAGE, &mut [0; 4096]).unwrap_err();
    }
}

#[test]
fn a_change_of_a_part_does_not_make_a_lie_true() {
    let dir = tempfile::tempdir().unwrap();
    let volume = Volume::new(config(1)).unwrap();
    let glass = Glass::join(&volume, dir.path(), 1, 1, Mode::Random);
    write(&volume, 0, 1);
    let right = glass.page(0);
    glass.put(0, &[9; 4096]);
    volume.write(WorkerId(0), 512, &[1; 512]).unwrap_err();
    volume.discard(WorkerId(0), 512, 512).unwrap_err();
    volume.read(WorkerId(0), 0, &mut [0; 512]).unwrap_err();
    glass.put(0, &right);
    expect(&volume, 0, 1);
}

#[test]
fn an_unknown_page_that_nobody_needs_holds_no_move_up() {
    let mut lender = OurLender::start(1);
    let short = || VolumeConfig { io_timeout: Duration::from_millis(200), ..config(1) };
    let first = Volume::new(short()).unwrap();
    first.add_lease(lender.lease(2)).unwrap();
    [0, 2].into_iter().for_each(|page| write(&first, page * PAGE, 1));
    lender.kill();
    first.write(WorkerId(0), PAGE, &content(PAGE, 1)).unwrap_err();
    let tags = first.tags(ExtentIndex(0));
    drop(first);
    lender.restart();
    // For the next process, page 1 was never written.
    let next = Volume::new(short()).unwrap();
    next.resume_lease(lender.lease(2)).unwrap();
    let held = [0..PAGE, 2 * PAGE..3 * PAGE];
    next.restore(ExtentIndex(0), (LeaseId(2), 0), held).unwrap();
    next.restore_tags(ExtentIndex(0), &tags);
    next.read(WorkerId(0), PAGE, &mut [0; 4096]).unwrap();
    let other = OurLender::start(1);
    next.add_lease(other.lease(4)).unwrap();
    next.evacuate(LeaseId(2), |_| ()).unwrap();
    [0, 2].into_iter().for_each(|page| expect(&next, page * PAGE, 1));
    expect_zeroes(&next, PAGE);
    let mut all = vec![0; 3 * 4096];
    next.read(WorkerId(0), 0, &mut all).unwrap();
    assert!(all[4096..2 * 4096] == [0; 4096]);
}

#[test]
fn writes_of_one_page_at_the_same_time_leave_one_of_them() {
    for mode in MODES {
        let dir = tempfile::tempdir().unwrap();
        let volume = Arc::new(Volume::new(config(1)).unwrap());
        Glass::join(&volume, dir.path(), 1, 1, mode);
        thread::scope(|threads| {
            for worker in 0..4_u8 {
                let volume = volume.clone();
                threads.spawn(move || {
                    for turn in 0..300_u64 {
                        let byte = (worker * 64 + (turn % 64) as u8) | 1;
                        let worker = WorkerId(worker.into());
                        // Several pages, in runs that overlap those of the other threads.
                        let pages = vec![byte; 3 * 4096];
                        let runs = [(turn % 3 * PAGE, &pages[..4096]), (4 * PAGE, &pages[..])];
                        volume.write_many(worker, &runs).unwrap();
                        volume.write(worker, turn % 5 * PAGE, &pages).unwrap();
                        volume.write(worker, 512 + turn % 5 * PAGE, &pages[..512]).unwrap();
                        let mut seen = vec![0; 8 * 4096];
                        volume.read(worker, 0, &mut seen).unwrap();
                    }
                });
            }
        });
        let mut seen = [0; 4096];
        (0..8).for_each(|page| volume.read(WorkerId(0), page * PAGE, &mut seen).unwrap());
    }
}
