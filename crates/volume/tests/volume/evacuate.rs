//! Extents move to leases and to the spill file, and no failure on the way loses data.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, WorkerId};
use aquifer_volume::{Evacuated, LeaseState, Moved, Progress, Volume, VolumeConfig, VolumeError};

use crate::common::*;

const PAGES: [u64; 7] = [0, 1, 2, 500, 8191, 8192, 16_383];

fn fill(volume: &Volume, extents: u64, round: u64) {
    for extent in 0..extents {
        PAGES.iter().for_each(|page| write(volume, extent * EXTENT_SIZE + page * PAGE, round));
    }
}

#[track_caller]
fn check(volume: &Volume, extents: u64, round: u64) {
    for extent in 0..extents {
        PAGES.iter().for_each(|page| expect(volume, extent * EXTENT_SIZE + page * PAGE, round));
        expect_zeroes(volume, extent * EXTENT_SIZE + 3 * PAGE);
    }
}

fn spilling(extents: u64, dir: &tempfile::TempDir) -> VolumeConfig {
    VolumeConfig {
        spill: Some(dir.path().to_owned()),
        io_timeout: Duration::from_secs(2),
        ..config(extents)
    }
}

#[test]
fn extents_move_to_other_leases_with_their_data_and_no_more() {
    let (volume, lenders) = volume(config(3), &[3]);
    fill(&volume, 3, 1);
    // Written zeroes count as holes.
    volume.write(WorkerId(0), 9000 * PAGE, &[0; 8192]).unwrap();
    let others = [lender(2), lender(1)];
    volume.add_lease(lease(&others[0], 2, 2)).unwrap();
    volume.add_lease(lease(&others[1], 3, 1)).unwrap();

    let mut seen = Vec::new();
    let evacuated = volume.evacuate(LeaseId(1), |progress| seen.push(progress)).unwrap();
    assert!(seen.is_sorted_by_key(|progress| progress.moved), "{seen:?}");
    assert_eq!(seen.last(), Some(&Progress { moved: 3, total: 3, left: Bytes::ZERO }));
    assert_eq!(evacuated.spilled, Bytes::ZERO);
    let mut to: Vec<_> = evacuated.to.iter().map(|moved| (moved.lease.0, moved.extents)).collect();
    to.sort_unstable();
    assert_eq!(to, [(2, 2), (3, 1)]);
    check(&volume, 3, 1);
    assert_eq!(placed(&volume), [2, 1], "the lease is out of the volume");
    assert_eq!(stored(&lenders[0]), 0, "its lender has its memory back");
    // nbdkit stores memory in blocks of 32 KiB: five of them hold the seven pages.
    assert_eq!(others.iter().map(stored).sum::<u64>(), 3 * 5 * (32 << 10));
    let error = volume.evacuate(LeaseId(1), |_| ()).unwrap_err();
    assert!(matches!(error, VolumeError::UnknownLease(..)), "{error}");
}

#[test]
fn a_volume_keeps_its_last_lease_even_if_that_is_empty() {
    let (volume, _lenders) = volume(config(3), &[2]);
    let error = volume.evacuate(LeaseId(1), |_| ()).unwrap_err();
    assert!(matches!(error, VolumeError::NoRoom(_)), "{error}");
    fill(&volume, 2, 1);
    check(&volume, 2, 1);
    assert_eq!(volume.status().leases[0].state, LeaseState::Ok);
}

#[test]
fn extents_without_a_lender_are_spilled_and_usable_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let (volume, _lenders) = volume(spilling(2, &dir), &[2]);
    fill(&volume, 2, 1);
    let other = lender(1);
    volume.add_lease(lease(&other, 2, 1)).unwrap();
    let evacuated = volume.evacuate(LeaseId(1), |_| ()).unwrap();
    let bytes = Bytes(PAGES.len() as u64 * PAGE);
    let to =
        vec![Moved { lease: LeaseId(2), lender: "lender-2".parse().unwrap(), extents: 1, bytes }];
    assert_eq!(evacuated, Evacuated { to, spilled: bytes });
    check(&volume, 2, 1);
    fill(&volume, 2, 2);
    check(&volume, 2, 2);
    assert_eq!(volume.status().spill.unwrap().used_extents, 1);
}

#[test]
fn without_room_anywhere_the_lease_stays_as_it_was() {
    let (volume, _lenders) = volume(config(3), &[2]);
    fill(&volume, 2, 1);
    let error = volume.evacuate(LeaseId(1), |_| ()).unwrap_err();
    assert!(matches!(error, VolumeError::NoRoom(_)), "{error}");
    check(&volume, 2, 1);
    assert_eq!(volume.status().leases[0].state, LeaseState::Ok);
}

#[test]
fn a_destination_that_is_full_is_passed_over() {
    let full = tempfile::NamedTempFile::new().unwrap();
    let trigger = format!("error-pwrite-file={}", full.path().display());
    let arguments = [
        "--filter=error",
        "memory",
        "128M",
        "error-pwrite=ENOSPC",
        "error-pwrite-rate=100%",
        &trigger,
    ];
    let destination = Nbdkit::start(&arguments);
    let dir = tempfile::tempdir().unwrap();
    let (volume, _lenders) = volume(spilling(1, &dir), &[1]);
    fill(&volume, 1, 1);
    volume.add_lease(lease(&destination, 2, 2)).unwrap();
    let evacuated = volume.evacuate(LeaseId(1), |_| ()).unwrap();
    assert!(evacuated.to.is_empty() && evacuated.spilled > Bytes::ZERO);
    check(&volume, 1, 1);
}

/// Starts a lender that delays each request of a kind, so that the test can act during a move.
fn slow(kind: &str, extents: u64) -> Nbdkit {
    Nbdkit::start(&[
        "--filter=delay",
        "memory",
        &format!("{}M", extents * 64),
        &format!("{kind}=20ms"),
    ])
}

/// Returns pages spread over an extent, so that each copied piece has some.
fn dense() -> impl Iterator<Item = u64> {
    (0..128).map(|piece| piece * 128 + piece % 100)
}

#[test]
fn a_destination_that_dies_in_the_middle_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (volume, _lenders) = volume(spilling(1, &dir), &[1]);
    dense().for_each(|page| write(&volume, page * PAGE, 1));
    let mut destination = slow("wdelay", 2);
    volume.add_lease(lease(&destination, 2, 2)).unwrap();
    thread::scope(|scope| {
        let mover = scope.spawn(|| volume.evacuate(LeaseId(1), |_| ()));
        wait_until("it has begun", || stored(&destination) > 0);
        destination.kill();
        // These pages lie below and above the copied part. No write may fail because of the
        // destination.
        dense().step_by(3).for_each(|page| write(&volume, page * PAGE, 2));
        let evacuated = mover.join().unwrap().unwrap();
        assert!(evacuated.to.is_empty() && evacuated.spilled > Bytes::ZERO, "{evacuated:?}");
    });
    dense()
        .enumerate()
        .for_each(|(at, page)| expect(&volume, page * PAGE, if at % 3 == 0 { 2 } else { 1 }));
}

#[test]
fn a_source_that_dies_in_the_middle_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut source = slow("rdelay", 1);
    let volume = Volume::new(spilling(2, &dir)).unwrap();
    volume.add_lease(lease(&source, 1, 1)).unwrap();
    dense().for_each(|page| write(&volume, page * PAGE, 1));
    write(&volume, EXTENT_SIZE, 1);
    thread::scope(|scope| {
        let mover = scope.spawn(|| volume.evacuate(LeaseId(1), |_| ()));
        let leaving = |state: &LeaseState| matches!(state, LeaseState::Evacuating { .. });
        wait_until("it has begun", || leaving(&volume.status().leases[0].state));
        source.kill();
        let error = mover.join().unwrap().unwrap_err();
        assert!(error.is_unreachable() && error.to_string().contains("lender lender-1"), "{error}");
    });
    // A read from the dead lender fails, and the other extent is intact.
    volume.read(WorkerId(0), 0, &mut [0; 1]).unwrap_err();
    expect(&volume, EXTENT_SIZE, 1);
    assert!(matches!(volume.status().leases[0].state, LeaseState::Unreachable { .. }));
}

#[test]
fn writes_and_discards_during_a_move_are_not_lost() {
    let destination = slow("wdelay", 1);
    let (volume, _lenders) = volume(config(1), &[1]);
    dense().for_each(|page| write(&volume, page * PAGE, 1));
    volume.add_lease(lease(&destination, 2, 1)).unwrap();
    let done = AtomicBool::new(false);
    let rounds = thread::scope(|scope| {
        let mover = scope.spawn(|| {
            volume.evacuate(LeaseId(1), |_| ()).unwrap();
            done.store(true, Ordering::Relaxed);
        });
        wait_until("it has begun", || stored(&destination) > 0);
        let mut round = 1;
        // A round takes about as long as the move. One more round after the move finds the extent
        // at its new place.
        let mut last = false;
        while !last {
            last = done.load(Ordering::Relaxed);
            round += 1;
            for page in dense().step_by(5) {
                write(&volume, page * PAGE, round);
                volume.discard(WorkerId(0), (page + 1) * PAGE, PAGE).unwrap();
                volume.write(WorkerId(0), (page + 2) * PAGE + 9, &round.to_le_bytes()).unwrap();
            }
        }
        mover.join().unwrap();
        round
    });
    for (at, page) in dense().enumerate() {
        expect(&volume, page * PAGE, if at % 5 == 0 { rounds } else { 1 });
        if at % 5 == 0 {
            expect_zeroes(&volume, (page + 1) * PAGE);
            assert_eq!(read(&volume, (page + 2) * PAGE)[9..17], rounds.to_le_bytes());
        }
    }
}
