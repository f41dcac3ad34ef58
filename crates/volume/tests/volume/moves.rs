//! Moves that cross each other, or end in another state than they began.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, WorkerId};
use aquifer_volume::holder::{FileHolder, Holder, HolderError};
use aquifer_volume::{Volume, VolumeConfig};

use crate::common::*;

fn spilling(extents: u64, dir: &tempfile::TempDir) -> VolumeConfig {
    VolumeConfig { spill: Some(dir.path().to_owned()), ..config(extents) }
}

/// Returns pages spread over an extent, so that each copied piece has some.
fn dense() -> impl Iterator<Item = u64> {
    (0..128).map(|piece| piece * 128 + piece % 100)
}

/// Starts a lender that delays each request of a kind, so that the test can act meanwhile.
fn slow(delay: &str) -> Nbdkit {
    Nbdkit::start(&["--filter=delay", "memory", "64M", delay])
}

#[test]
fn an_extent_moving_to_a_departing_lease_is_not_left_there() {
    let dir = tempfile::tempdir().unwrap();
    let trigger = dir.path().join("full");
    let file = format!("error-pwrite-file={}", trigger.display());
    let (errors, rate) = ("error-pwrite=ENOSPC", "error-pwrite-rate=100%");
    let first = Nbdkit::start(&[
        "--filter=delay",
        "--filter=error",
        "memory",
        "64M",
        "rdelay=20ms",
        errors,
        rate,
        &file,
    ]);
    let second = lender(1);
    let volume = Volume::new(spilling(1, &dir)).unwrap();
    volume.add_lease(lease(&first, 1, 1)).unwrap();
    dense().for_each(|page| write(&volume, page * PAGE, 1));
    volume.add_lease(lease(&second, 2, 1)).unwrap();
    File::create(&trigger).unwrap();
    thread::scope(|scope| {
        // The first lender is full, so the extent moves to the second, which leaves at that moment.
        let writer = scope.spawn(|| write(&volume, 0, 2));
        wait_until("it moves to the second lender", || stored(&second) > 0);
        volume.evacuate(LeaseId(2), |_| ()).unwrap();
        writer.join().unwrap();
    });
    assert_eq!(stored(&second), 0, "the second lender has its memory back");
    assert_eq!(volume.status().spill.unwrap().used_extents, 1);
    drop(second);
    dense().for_each(|page| expect(&volume, page * PAGE, if page == 0 { 2 } else { 1 }));
}

/// A lender of two extents whose reads of one wait for a read of the other.
struct Meeting {
    file: FileHolder,
    met: (Mutex<BTreeSet<u64>>, Condvar),
}

impl Holder for Meeting {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        let (met, changed) = &self.met;
        let mut met = met.lock().unwrap_or_else(PoisonError::into_inner);
        met.insert(offset / EXTENT_SIZE);
        changed.notify_all();
        let waits = |met: &mut BTreeSet<u64>| met.len() < 2;
        let (met, waited) = changed
            .wait_timeout_while(met, Duration::from_secs(30), waits)
            .unwrap_or_else(PoisonError::into_inner);
        drop(met);
        if waited.timed_out() {
            return Err(HolderError::Failed("the other extent does not move".into()));
        }
        self.file.read(worker, offset, into)
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.file.write(worker, offset, data)
    }

    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.file.discard(worker, offset, length)
    }

    fn flush(&self, worker: WorkerId) -> Result<(), HolderError> {
        self.file.flush(worker)
    }
}

#[test]
fn two_extents_move_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let file = FileHolder::create(dir.path(), Bytes(2 * EXTENT_SIZE), 2).unwrap();
    let other = lender(2);
    let volume = Volume::new(config(2)).unwrap();
    let meeting = Box::new(Meeting { file, met: Default::default() });
    volume.add_holder(lease(&other, 1, 2), meeting, 2, |_| true).unwrap();
    let pages = || [0, EXTENT_SIZE].into_iter().flat_map(|at| dense().map(move |p| at + p * PAGE));
    pages().for_each(|at| write(&volume, at, 1));
    volume.add_lease(lease(&other, 2, 2)).unwrap();
    let evacuated = volume.evacuate(LeaseId(1), |_| ()).unwrap();
    assert_eq!(evacuated.to.iter().map(|moved| moved.extents).sum::<u64>(), 2);
    pages().for_each(|at| expect(&volume, at, 1));
}

#[test]
fn writes_that_a_full_lender_refuses_follow_an_evacuation() {
    let dir = tempfile::tempdir().unwrap();
    let trigger = dir.path().join("full");
    let file = format!("error-pwrite-file={}", trigger.display());
    let full = ["error-pwrite=ENOSPC", "error-pwrite-rate=100%", &file];
    let slow = ["--filter=delay", "--filter=error", "memory", "192M", "rdelay=5ms"];
    let first = Nbdkit::start(&[&slow[..], &full[..]].concat());
    let second = lender(3);
    let volume = Volume::new(config(3)).unwrap();
    volume.add_lease(lease(&first, 1, 3)).unwrap();
    let all =
        || (0..3).flat_map(|extent| dense().map(move |page| extent * EXTENT_SIZE + page * PAGE));
    all().for_each(|at| write(&volume, at, 1));
    volume.add_lease(lease(&second, 2, 3)).unwrap();
    File::create(&trigger).unwrap();
    thread::scope(|scope| {
        let mover = scope.spawn(|| volume.evacuate(LeaseId(1), |_| ()));
        // Each of these writes finds the first lender full, or the extent elsewhere.
        let writers: Vec<_> = (0..3)
            .map(|extent| {
                let volume = &volume;
                scope.spawn(move || write(volume, extent * EXTENT_SIZE, 2))
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        mover.join().unwrap().unwrap();
    });
    drop(first);
    assert_eq!(placed(&volume), [3]);
    all().for_each(|at| expect(&volume, at, if at % EXTENT_SIZE == 0 { 2 } else { 1 }));
}

#[test]
fn an_extent_that_is_emptied_while_it_moves_gives_its_slot_back() {
    let destination = slow("wdelay=100ms");
    let (volume, lenders) = volume(config(1), &[1]);
    dense().for_each(|page| write(&volume, page * PAGE, 1));
    volume.add_lease(lease(&destination, 2, 1)).unwrap();
    thread::scope(|scope| {
        let mover = scope.spawn(|| volume.evacuate(LeaseId(1), |_| ()));
        wait_until("it has begun", || stored(&destination) > 0);
        volume.discard(WorkerId(0), 0, EXTENT_SIZE).unwrap();
        let evacuated = mover.join().unwrap().unwrap();
        assert!(evacuated.to.is_empty(), "{evacuated:?}");
    });
    assert_eq!(placed(&volume), [0]);
    assert_eq!(volume.status().placed_extents, 0);
    assert_eq!((stored(&lenders[0]), stored(&destination)), (0, 0));
    expect_zeroes(&volume, 0);
}

#[test]
fn an_extent_moves_to_a_lender_that_takes_only_short_writes() {
    let arguments = [
        "--filter=blocksize-policy",
        "memory",
        "64M",
        "blocksize-minimum=4096",
        "blocksize-maximum=64K",
        "blocksize-error-policy=error",
    ];
    let destination = Nbdkit::start(&arguments);
    let (volume, _lenders) = volume(config(1), &[1]);
    let pages = 0..256;
    pages.clone().for_each(|page| write(&volume, page * PAGE, 1));
    volume.add_lease(lease(&destination, 2, 1)).unwrap();
    let evacuated = volume.evacuate(LeaseId(1), |_| ()).unwrap();
    assert_eq!(evacuated.to[0].bytes, Bytes(256 * PAGE));
    pages.for_each(|page| expect(&volume, page * PAGE, 1));
}

#[test]
fn pages_beside_a_discard_are_read_and_written_meanwhile() {
    let slow = slow("delay-zero=3");
    let volume =
        Volume::new(VolumeConfig { io_timeout: Duration::from_secs(60), ..config(1) }).unwrap();
    volume.add_lease(lease(&slow, 1, 1)).unwrap();
    let (here, there) = (0, EXTENT_SIZE / 2);
    [here, there].iter().for_each(|at| write(&volume, *at, 1));
    let discarded = AtomicBool::new(false);
    thread::scope(|scope| {
        let discard = scope.spawn(|| {
            volume.discard(WorkerId(1), here, PAGE).unwrap();
            discarded.store(true, Ordering::Relaxed);
        });
        let mut rounds = 1;
        while !discarded.load(Ordering::Relaxed) {
            expect(&volume, there, rounds);
            rounds += 1;
            write(&volume, there, rounds);
        }
        discard.join().unwrap();
        assert!(rounds > 10, "{rounds} rounds beside a discard of three seconds");
        expect(&volume, there, rounds);
    });
    expect_zeroes(&volume, here);
}

/// Reads the content of this process's nameless files in a directory.
fn nameless(dir: &Path) -> Vec<u8> {
    let fds = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let ours = fds.filter(|fd| fs::read_link(fd).is_ok_and(|path| path.starts_with(dir)));
    ours.flat_map(|fd| fs::read(fd).unwrap()).collect()
}

#[test]
fn a_spilled_page_cannot_be_read_on_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let volume = Volume::new(spilling(1, &dir)).unwrap();
    // Equal pages must not look alike.
    let page = content(0, 1);
    [1, 5].iter().for_each(|at| volume.write(WorkerId(0), at * PAGE, &page).unwrap());
    volume.write(WorkerId(0), 9 * PAGE + 100, b"a part of a page").unwrap();
    assert_eq!(volume.status().spill.unwrap().used_extents, 1);
    let on_disk = nameless(dir.path());
    let held: Vec<_> =
        on_disk.chunks(PAGE_SIZE).filter(|page| page.iter().any(|byte| *byte != 0)).collect();
    assert!(held.len() >= 3);
    assert!(
        held.iter()
            .all(|held| *held != page && !held.windows(16).any(|part| part == b"a part of a page"))
    );
    assert_ne!(&on_disk[PAGE_SIZE..][..PAGE_SIZE], &on_disk[5 * PAGE_SIZE..][..PAGE_SIZE]);
    let mut back = [0; 16];
    volume.read(WorkerId(0), 9 * PAGE + 100, &mut back).unwrap();
    assert_eq!(&back, b"a part of a page");
    [1, 5].iter().for_each(|at| assert!(read(&volume, at * PAGE) == page));
    volume.discard(WorkerId(0), PAGE, PAGE).unwrap();
    expect_zeroes(&volume, PAGE);
}
