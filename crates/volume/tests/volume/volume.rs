//! Content, placement and refusals, over healthy lenders.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, WorkerId};
use aquifer_volume::{LeaseState, LeaseTarget, Volume, VolumeConfig, VolumeError};

use crate::common::*;

/// Enough for a read to fall between a write and its acknowledgement, some thousand times.
const ROUNDS: u32 = 20_000;

#[test]
fn unwritten_bytes_read_as_zeroes_without_a_request() {
    let volume = Volume::new(config(4)).unwrap();
    let mut data = vec![0xee; 1 << 20];
    volume.read(WorkerId(0), EXTENT_SIZE - 1000, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 0));
    volume.discard(WorkerId(0), 0, 4 * EXTENT_SIZE).unwrap();
}

#[test]
fn an_extent_goes_to_the_roomiest_lease_then_the_lowest_id() {
    let (volume, _lenders) = volume(config(8), &[1, 3, 3]);
    let mut seen = Vec::new();
    for extent in 0..7 {
        write(&volume, extent * EXTENT_SIZE, 1);
        seen.push(placed(&volume));
    }
    let expected: [[u64; 3]; 7] =
        [[0, 1, 0], [0, 1, 1], [0, 2, 1], [0, 2, 2], [1, 2, 2], [1, 3, 2], [1, 3, 3]];
    assert_eq!(seen, expected);
    let error = volume.write(WorkerId(0), 7 * EXTENT_SIZE, &[1]).unwrap_err();
    assert!(matches!(error, VolumeError::NoRoom(_)), "{error}");
    for extent in 0..7 {
        expect(&volume, extent * EXTENT_SIZE, 1);
    }
}

#[test]
fn a_request_may_cross_extents_of_different_lenders() {
    let (volume, lenders) = volume(config(3), &[1, 1, 1]);
    let data: Vec<u8> = (0..EXTENT_SIZE as usize + 9000).map(|at| (at % 251) as u8 + 1).collect();
    volume.write(WorkerId(1), EXTENT_SIZE - 5000, &data).unwrap();
    assert_eq!(placed(&volume), [1, 1, 1]);
    let mut back = vec![0; data.len() + 200];
    volume.read(WorkerId(2), EXTENT_SIZE - 5100, &mut back).unwrap();
    assert!(
        back[100..back.len() - 100] == data
            && back[..100] == [0; 100]
            && back[back.len() - 100..] == [0; 100]
    );
    assert!(lenders.iter().all(|lender| stored(lender) > 0));
}

#[test]
fn bytes_within_a_page_can_be_written_and_discarded() {
    let (volume, _lenders) = volume(config(1), &[1]);
    volume.write(WorkerId(0), 10, b"hello").unwrap();
    volume.write(WorkerId(0), 4090, b"across pages").unwrap();
    volume.discard(WorkerId(0), 12, 2).unwrap();
    let mut data = [0xee; 20];
    volume.read(WorkerId(0), 0, &mut data).unwrap();
    assert_eq!(data, *b"\0\0\0\0\0\0\0\0\0\0he\0\0o\0\0\0\0\0");
    volume.discard(WorkerId(0), 4093, 100).unwrap();
    let mut data = [0xee; 16];
    volume.read(WorkerId(0), 4088, &mut data).unwrap();
    assert_eq!(data, *b"\0\0acr\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn a_wholly_discarded_extent_gives_back_a_clean_slot() {
    let (volume, lenders) = volume(config(4), &[1]);
    for page in [0, 1, 700, 16_383] {
        write(&volume, page * PAGE, 1);
    }
    let error = volume.write(WorkerId(0), EXTENT_SIZE, &[1]).unwrap_err();
    assert!(matches!(error, VolumeError::NoRoom(_)), "{error}");
    // In parts, and beyond the written extent.
    volume.discard(WorkerId(0), 0, 2 * PAGE).unwrap();
    assert_eq!(placed(&volume), [1]);
    volume.write_zeroes(WorkerId(0), 2 * PAGE, 4 * EXTENT_SIZE - 2 * PAGE).unwrap();
    assert_eq!((placed(&volume), stored(&lenders[0])), (vec![0], 0));
    // Now another extent has the slot, and no old data appears in it.
    write(&volume, 3 * EXTENT_SIZE + PAGE, 2);
    assert_eq!(placed(&volume), [1]);
    for page in [0, 700, 16_383] {
        expect_zeroes(&volume, page * PAGE);
        expect_zeroes(&volume, 3 * EXTENT_SIZE + page * PAGE);
    }
    expect(&volume, 3 * EXTENT_SIZE + PAGE, 2);
}

#[test]
fn earlier_data_in_an_export_is_not_visible() {
    let server = lender(2);
    {
        let former = Volume::new(config(2)).unwrap();
        former.add_lease(lease(&server, 1, 2)).unwrap();
        write(&former, 5 * PAGE, 1);
    }
    let volume = Volume::new(config(2)).unwrap();
    volume.add_lease(lease(&server, 2, 2)).unwrap();
    for extent in [0, 1] {
        volume.write(WorkerId(0), extent * EXTENT_SIZE + 5 * PAGE, b"new").unwrap();
        assert_eq!(read(&volume, extent * EXTENT_SIZE + 5 * PAGE)[3..], [0; 4093]);
    }
}

#[test]
fn a_server_that_cannot_zero_is_zeroed_by_writing() {
    let server = Nbdkit::start(&["--filter=nozero", "memory", "64M"]);
    let volume = Volume::new(config(1)).unwrap();
    volume.add_lease(lease(&server, 1, 1)).unwrap();
    write(&volume, 0, 1);
    volume.discard(WorkerId(0), 0, PAGE).unwrap();
    volume.write(WorkerId(0), 100, b"x").unwrap();
    assert_eq!(read(&volume, 0)[101..], [0; 3995]);
}

#[test]
fn leases_are_reached_by_mutual_tls() {
    let cluster = Cluster::new();
    let server = Nbdkit::start_tls(&cluster.dir("lender"), &["memory", "64M"]);
    let tls = Some(cluster.identity("borrower"));
    let volume = Volume::new(VolumeConfig { tls, ..config(1) }).unwrap();
    let target = secure(lease(&server, 1, 1), "lender");
    // Only under the right name, and not without this host's certificate.
    let other = LeaseTarget { lender: "borrower".parse().unwrap(), ..target.clone() };
    let error = volume.add_lease(other).unwrap_err();
    assert!(matches!(error, VolumeError::Connect { .. }), "{error}");
    let error = Volume::new(config(1)).unwrap().add_lease(target.clone()).unwrap_err().to_string();
    assert!(error.contains("this host has no certificate"), "{error}");
    volume.add_lease(target).unwrap();
    write(&volume, 123 * PAGE, 1);
    expect(&volume, 123 * PAGE, 1);
}

#[test]
fn a_lease_that_cannot_be_used_is_refused_with_the_reason() {
    let server = lender(1);
    let volume = Volume::new(config(1)).unwrap();
    let good = lease(&server, 1, 1);
    let refusal = |target: LeaseTarget| volume.add_lease(target).unwrap_err().to_string();
    let too_small = refusal(LeaseTarget { capacity: Bytes::mib(63), ..good.clone() });
    assert!(too_small.contains("less than one extent"), "{too_small}");
    let too_large = refusal(LeaseTarget { capacity: Bytes::mib(128), ..good.clone() });
    assert!(too_large.contains("its export has 64MiB, but the lease says 128MiB"), "{too_large}");
    let nobody =
        refusal(LeaseTarget { address: "unix:/nonexistent".parse().unwrap(), ..good.clone() });
    assert!(nobody.contains("lender-1") && nobody.contains("cannot connect"), "{nobody}");
    let read_only = Nbdkit::start(&["--readonly", "memory", "64M"]);
    let read_only = refusal(lease(&read_only, 1, 1));
    assert!(read_only.contains("read-only"), "{read_only}");
    volume.add_lease(good.clone()).unwrap();
    let twice = refusal(good);
    assert!(twice.contains("already"), "{twice}");
}

#[test]
fn a_range_outside_the_volume_is_refused() {
    let volume = Volume::new(VolumeConfig { capacity: Bytes::mib(100), ..config(1) }).unwrap();
    for (offset, length) in [(Bytes::mib(100).0, 1), (u64::MAX, 2), (0, Bytes::mib(100).0 + 1)] {
        let error = volume.discard(WorkerId(0), offset, length).unwrap_err();
        assert!(matches!(error, VolumeError::OutOfRange { .. }), "{error}");
    }
    volume.read(WorkerId(0), Bytes::mib(100).0 - 10, &mut [0; 10]).unwrap();
}

#[test]
fn without_lenders_the_spill_file_takes_what_is_written() {
    // One directory is on a file system with direct I/O, if there is one. The other needs none.
    for dir in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        let dir = tempfile::tempdir_in(dir).unwrap();
        let spill = Some(dir.path().to_owned());
        let volume = Volume::new(VolumeConfig { spill, ..config(4) }).unwrap();
        let data: Vec<u8> = (0..1_000_001).map(|at| (at % 251) as u8).collect();
        for offset in [0, EXTENT_SIZE - 300_000, 3 * EXTENT_SIZE + 7] {
            volume.write(WorkerId(3), offset, &data).unwrap();
            let mut back = vec![0; data.len()];
            volume.read(WorkerId(2), offset, &mut back).unwrap();
            assert!(back == data);
        }
        assert_eq!(volume.status().spill.unwrap().used_extents, 3);
        volume.discard(WorkerId(0), 0, 4 * EXTENT_SIZE).unwrap();
        assert_eq!(volume.status().spill.unwrap().used_extents, 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
    }
}

#[test]
fn a_spill_directory_that_is_not_there_is_named() {
    let spill = Some("/nonexistent".into());
    let error = Volume::new(VolumeConfig { spill, ..config(1) }).unwrap_err().to_string();
    assert!(error.contains("/nonexistent"), "{error}");
}

#[test]
fn the_status_tells_what_is_where_and_survives_json() {
    let (volume, _lenders) = volume(config(4), &[2, 1]);
    write(&volume, 0, 1);
    write(&volume, EXTENT_SIZE, 1);
    write(&volume, EXTENT_SIZE, 2);
    read(&volume, 0);
    volume.discard(WorkerId(0), 0, 4 * PAGE).unwrap();
    let status = volume.status();
    assert_eq!((status.placed_extents, status.written), (1, Bytes(PAGE)));
    assert_eq!(status.traffic.written, Bytes(3 * PAGE));
    assert_eq!((status.traffic.read, status.traffic.discarded), (Bytes(PAGE), Bytes(4 * PAGE)));
    let leases: Vec<_> = status
        .leases
        .iter()
        .map(|lease| (lease.lease, lease.extents, lease.state.clone()))
        .collect();
    assert_eq!(leases, [(LeaseId(1), 2, LeaseState::Ok), (LeaseId(2), 1, LeaseState::Ok)]);
    assert!(status.leases.iter().all(|lease| lease.encryption.is_none()));
    let text = serde_json::to_string(&status).unwrap();
    assert_eq!(serde_json::from_str::<aquifer_volume::VolumeStatus>(&text).unwrap(), status);
}

#[test]
fn a_read_racing_a_first_write_reports_no_lost_lender() {
    let (volume, _lenders) = volume(config(1), &[1]);
    // Keeps the extent in its place while its other page is discarded.
    write(&volume, PAGE, 1);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut pages = [0; 2 * PAGE_SIZE];
            let mut reads = 0;
            while !is_over.load(Ordering::Relaxed) {
                volume
                    .read(WorkerId(1), 0, &mut pages)
                    .map_err(|error| format!("read {reads}: {error}"))?;
                reads += 1;
            }
            Ok::<_, String>(reads)
        });
        for _ in 0..ROUNDS {
            volume.write(WorkerId(0), 0, &[7; PAGE_SIZE]).unwrap();
            volume.discard(WorkerId(0), 0, PAGE).unwrap();
            if reader.is_finished() {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap().unwrap() > 0);
    });
}
