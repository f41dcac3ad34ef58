//! Lenders that die, fall silent, come back, or have less than they promised.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{EXTENT_SIZE, WorkerId};
use aquifer_transport::Address;
use aquifer_volume::{LeaseState, Volume, VolumeConfig};

use crate::common::*;

/// Longer than the timeout, shorter than a hang.
const LIMIT: Duration = Duration::from_secs(60);

fn impatient(extents: u64) -> VolumeConfig {
    VolumeConfig { io_timeout: Duration::from_secs(2), ..config(extents) }
}

/// Starts a lender with pages that outlive it, like those of Aquifer's lenders.
fn lasting(dir: &tempfile::TempDir, extents: u64) -> Nbdkit {
    let path = dir.path().join("pages");
    File::create(&path).unwrap().set_len(extents * EXTENT_SIZE).unwrap();
    Nbdkit::start(&["file", path.to_str().unwrap()])
}

/// Starts a lender that has no room from the time when `trigger` exists.
fn overcommitted(trigger: &std::path::Path) -> Nbdkit {
    let trigger = format!("error-pwrite-file={}", trigger.display());
    Nbdkit::start(&[
        "--filter=error",
        "memory",
        "128M",
        "error-pwrite=ENOSPC",
        "error-pwrite-rate=100%",
        &trigger,
    ])
}

#[test]
fn a_lender_killed_during_a_write_is_a_timely_error_naming_it() {
    let (volume, mut lenders) = volume(impatient(4), &[2, 2]);
    write(&volume, 0, 1);
    write(&volume, EXTENT_SIZE, 1);
    let dying = &volume;
    let error = thread::scope(|scope| {
        let writer = scope.spawn(move || {
            for round in 2.. {
                let started = Instant::now();
                if let Err(error) = dying.write(WorkerId(1), 7 * PAGE, &content(7 * PAGE, round)) {
                    assert!(started.elapsed() < LIMIT, "it took {:?}", started.elapsed());
                    return error;
                }
            }
            unreachable!()
        });
        wait_until("it is being written to", || volume.status().traffic.written.0 > 100 * PAGE);
        lenders[0].kill();
        writer.join().unwrap()
    });
    assert!(error.is_unreachable(), "{error}");
    for part in ["lender lender-1", "lease 00000000000000000000000000000001", "page 7"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // The other lender's extents are intact, and new ones go there.
    expect(&volume, EXTENT_SIZE, 1);
    write(&volume, 2 * EXTENT_SIZE, 1);
    assert_eq!(placed(&volume), [1, 2]);
    let status = volume.status();
    assert!(matches!(status.leases[0].state, LeaseState::Unreachable { .. }), "{status:?}");
    assert!(status.errors > 0 && status.last_error.unwrap().contains("lender-1"));
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::TimedOut);
    // A read of a lost page is an error, never zeroes. It fails fast, as the lender is known to be
    // away.
    volume.read(WorkerId(0), 0, &mut [0; 16]).unwrap_err();
}

#[test]
fn a_lender_that_is_restarted_within_the_timeout_is_not_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let mut lender = lasting(&dir, 1);
    let volume = Volume::new(config(1)).unwrap();
    volume.add_lease(lease(&lender, 1, 1)).unwrap();
    for page in 0..64 {
        write(&volume, page * PAGE, 1);
    }
    for round in 2..5 {
        lender.kill();
        thread::scope(|scope| {
            let volume = &volume;
            let reader = scope
                .spawn(move || (0..64).for_each(|page| expect(volume, page * PAGE, round - 1)));
            lender.restart();
            reader.join().unwrap();
        });
        for page in 0..64 {
            volume
                .write(WorkerId(page as usize % 4), page * PAGE, &content(page * PAGE, round))
                .unwrap();
        }
    }
    assert_eq!(volume.status().errors, 0);
    assert_eq!(volume.status().leases[0].state, LeaseState::Ok);
}

#[test]
fn a_silent_lender_is_a_timely_error_and_is_used_again() {
    let (volume, lenders) = volume(impatient(2), &[1]);
    write(&volume, 0, 1);
    lenders[0].freeze();
    let started = Instant::now();
    let error = volume.read(WorkerId(0), 0, &mut [0; 4096]).unwrap_err();
    assert!(
        error.is_unreachable() && started.elapsed() < LIMIT,
        "{error} after {:?}",
        started.elapsed()
    );
    lenders[0].thaw();
    // The status notices this without other I/O.
    wait_until("it is seen to be back", || volume.status().leases[0].state == LeaseState::Ok);
    expect(&volume, 0, 1);
}

#[test]
fn a_status_tries_a_lost_lender_once() {
    let (volume, mut lenders) = volume(impatient(1), &[1]);
    write(&volume, 0, 1);
    lenders[0].kill();
    volume.read(WorkerId(0), 0, &mut [0; 1]).unwrap_err();
    let Address::Unix(path) = lenders[0].address() else { unreachable!("it is on a unix socket") };
    std::fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    // Connections wait in the backlog without an answer.
    let visits = || std::iter::from_fn(|| listener.accept().ok()).count();
    assert!(matches!(volume.status().leases[0].state, LeaseState::Unreachable { .. }));
    assert_eq!(visits(), 1);
    assert!(matches!(volume.known_status().leases[0].state, LeaseState::Unreachable { .. }));
    assert_eq!(visits(), 0);
}

#[test]
fn new_extents_go_to_a_lost_lender_only_as_a_last_resort() {
    let (volume, mut lenders) = volume(impatient(5), &[3, 1]);
    write(&volume, 0, 1);
    lenders[0].kill();
    volume.read(WorkerId(0), 0, &mut [0; 1]).unwrap_err();
    write(&volume, EXTENT_SIZE, 1);
    assert_eq!(placed(&volume), [1, 1]);
    let error = volume.write(WorkerId(0), 2 * EXTENT_SIZE, &[1]).unwrap_err();
    assert!(error.is_unreachable(), "{error}");
}

#[test]
fn extents_refused_by_a_full_lender_move_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let trigger = dir.path().join("full");
    let full = overcommitted(&trigger);
    let volume = Volume::new(config(4)).unwrap();
    volume.add_lease(lease(&full, 1, 2)).unwrap();
    for page in [0, 5, 9000] {
        write(&volume, page * PAGE, 1);
    }
    File::create(&trigger).unwrap();

    // With this lender alone, the write fails with the reason, and the old data stays.
    let error = volume.write(WorkerId(0), 5 * PAGE, &content(5 * PAGE, 2)).unwrap_err();
    assert!(
        error.to_string().contains("lender-1") && error.to_string().contains("full"),
        "{error}"
    );
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::StorageFull);
    expect(&volume, 0, 1);

    let other = lender(2);
    volume.add_lease(lease(&other, 2, 2)).unwrap();
    write(&volume, 5 * PAGE, 3);
    assert_eq!(placed(&volume), [0, 1]);
    assert_eq!(volume.status().leases[0].state, LeaseState::Full);
    for (page, round) in [(0, 1), (5, 3), (9000, 1)] {
        expect(&volume, page * PAGE, round);
    }
    // Nor does the full lender get a new extent while there is another lender.
    write(&volume, EXTENT_SIZE, 1);
    assert_eq!(placed(&volume), [0, 2]);
}

#[test]
fn a_worker_is_not_held_up_by_another_ones_silent_lender() {
    let (volume, lenders) =
        volume(VolumeConfig { io_timeout: Duration::from_secs(60), ..config(2) }, &[1, 1]);
    write(&volume, 0, 1);
    write(&volume, EXTENT_SIZE, 1);
    lenders[0].freeze();
    thread::scope(|scope| {
        let stuck = scope.spawn(|| volume.read(WorkerId(1), 0, &mut [0; 4096]));
        for page in 0..500 {
            write(&volume, EXTENT_SIZE + page * PAGE, 2);
        }
        assert!(!stuck.is_finished());
        lenders[0].thaw();
        stuck.join().unwrap().unwrap();
    });
}

#[test]
fn after_the_timeout_thousands_of_operations_fail_at_once() {
    let (volume, mut lenders) = volume(impatient(1), &[1]);
    write(&volume, 0, 1);
    lenders[0].kill();
    let started = Instant::now();
    for attempt in 0..5000 {
        let error = volume.read(WorkerId(attempt % 4), 0, &mut [0; 4096]).unwrap_err();
        assert!(error.is_unreachable() && error.to_string().contains("lender-1"), "{error}");
    }
    assert!(started.elapsed() < LIMIT, "took {:?}", started.elapsed());
}
