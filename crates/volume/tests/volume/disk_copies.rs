//! Volumes with a second copy of each page on this host's disk, and what is left when the lender
//! dies or lies.

use std::fs;
use std::sync::Arc;

use aquifer_page::{Bytes, LeaseId, WorkerId};
use aquifer_volume::{DiskCopies, DiskCopyStatus, Upkeep, Volume};
use tempfile::TempDir;

use crate::common::*;

const PAGES: u64 = 300;

/// A volume over one lender, with copies on the disk.
struct OnDisk {
    volume: Arc<Volume>,
    lender: OurLender,
    directory: TempDir,
    _upkeep: Upkeep,
}

impl OnDisk {
    /// Starts with a lease that is encrypted if its number is odd.
    fn start(lease: u128) -> Self {
        let (lender, directory) = (OurLender::start(1), tempfile::tempdir().unwrap());
        let volume = Arc::new(Volume::new(config(1)).unwrap());
        volume.add_lease(lender.lease(lease)).unwrap();
        // Pages from before the copy are copied, too.
        (0..PAGES / 2).for_each(|page| write(&volume, page * PAGE, 1));
        let copies = DiskCopies::new(directory.path().join("copy"));
        let copies = DiskCopies { ring: Bytes(64 * PAGE), ..copies };
        volume.keep_disk_copies(&copies, false).unwrap();
        let upkeep = Upkeep::start(&volume, |_| ()).unwrap();
        (PAGES / 2..PAGES).for_each(|page| write(&volume, page * PAGE, 1));
        let on_disk = Self { volume, lender, directory, _upkeep: upkeep };
        on_disk.is_whole();
        on_disk
    }

    fn status(&self) -> Option<DiskCopyStatus> {
        let leases = self.volume.known_status().leases;
        leases.last().and_then(|lease| lease.disk.clone())
    }

    #[track_caller]
    fn is_whole(&self) {
        wait_until("the disk has all pages", || {
            self.status().is_some_and(|copy| {
                copy.lender_answers
                    && copy.held == Bytes(PAGES * PAGE)
                    && [copy.lacks, copy.lender_lacks, copy.in_ring] == [Bytes(0); 3]
            })
        });
    }

    #[track_caller]
    fn expect_all(&self, round: u64) {
        (0..PAGES).for_each(|page| expect(&self.volume, page * PAGE, round));
        let mut many = vec![0; 40 * PAGE as usize];
        self.volume.read(WorkerId(1), 7 * PAGE, &mut many).unwrap();
        for (page, data) in (7..).zip(many.chunks(PAGE as usize)) {
            assert!(data == content(page * PAGE, round));
        }
    }

    /// Returns the one file in the directory.
    fn file(&self) -> std::path::PathBuf {
        let mut files = fs::read_dir(self.directory.path()).unwrap();
        let file = files.next().unwrap().unwrap().path();
        assert!(files.next().is_none());
        file
    }
}

#[test]
fn the_disk_has_what_a_dead_lender_had() {
    for lease in [1, 2] {
        let mut on_disk = OnDisk::start(lease);
        on_disk.lender.kill();
        on_disk.expect_all(1);
        (0..PAGES).step_by(2).for_each(|page| write(&on_disk.volume, page * PAGE, 2));
        on_disk.volume.discard(WorkerId(0), 101 * PAGE, PAGE).unwrap();
        let expect_all = || {
            for page in (0..PAGES).filter(|page| *page != 101) {
                expect(&on_disk.volume, page * PAGE, if page % 2 == 0 { 2 } else { 1 });
            }
            expect_zeroes(&on_disk.volume, 101 * PAGE);
        };
        expect_all();
        let copy = on_disk.status().unwrap();
        // While the lender is away, each write waits for the disk.
        assert_eq!((copy.in_ring, copy.lender_answers), (Bytes(0), false));
        assert!(copy.lender_lacks >= Bytes(PAGES / 2 * PAGE), "{copy:?}");
        assert!(on_disk.volume.relies_on_copy(false).is_some());
        // It comes back stale: with the pages as they were when it died.
        on_disk.lender.restart();
        wait_until("the lender gets what it missed", || {
            on_disk.status().is_some_and(|copy| {
                copy.lender_answers && [copy.lacks, copy.lender_lacks] == [Bytes(0); 2]
            })
        });
        expect_all();
    }
}

#[test]
fn a_disk_copy_is_encrypted_whatever_the_lender_gets() {
    for lease in [1, 2] {
        let on_disk = OnDisk::start(lease);
        let file = fs::read(on_disk.file()).unwrap();
        let secret = content(5 * PAGE, 1);
        let stored = &file[5 * PAGE as usize..6 * PAGE as usize];
        assert!(stored.iter().any(|byte| *byte != 0));
        assert!(stored.chunks(8).zip(secret.chunks(8)).all(|(one, other)| one != other));
    }
}

#[test]
fn a_changed_page_on_the_disk_is_not_believed() {
    let mut on_disk = OnDisk::start(1);
    let path = on_disk.file();
    let mut file = fs::read(&path).unwrap();
    file[7 * PAGE as usize + 5] ^= 1;
    file.copy_within(20 * PAGE as usize..21 * PAGE as usize, 21 * PAGE as usize);
    fs::write(&path, &file).unwrap();
    on_disk.expect_all(1);
    on_disk.lender.kill();
    for page in 0..PAGES {
        let mut data = [0; PAGE as usize];
        let read = on_disk.volume.read(WorkerId(0), page * PAGE, &mut data);
        // A scrub may have found it, and the lender had the page still.
        if ![7, 21].contains(&page) {
            read.unwrap();
        } else if read.is_err() {
            continue;
        }
        assert!(data == content(page * PAGE, 1), "page {page}");
    }
}

#[test]
fn a_lender_that_is_back_empty_loses_nothing_with_a_disk_copy() {
    let mut on_disk = OnDisk::start(1);
    on_disk.lender.kill();
    on_disk.lender.restart_empty();
    on_disk.expect_all(1);
    (0..PAGES).for_each(|page| write(&on_disk.volume, page * PAGE, 2));
    on_disk.expect_all(2);
}

#[test]
fn pages_move_from_the_disk_to_another_lender() {
    let mut on_disk = OnDisk::start(1);
    on_disk.lender.kill();
    let other = OurLender::start(1);
    on_disk.volume.add_lease(other.lease(5)).unwrap();
    on_disk.volume.evacuate(LeaseId(1), |_| ()).unwrap();
    on_disk.is_whole();
    on_disk.expect_all(1);
    // The file of the old lease is gone, and the new one has one.
    on_disk.file();
    on_disk.lender = other;
    on_disk.lender.kill();
    on_disk.expect_all(1);
    on_disk.volume.empty_copies();
    assert_eq!(fs::read_dir(on_disk.directory.path()).unwrap().count(), 0);
}
