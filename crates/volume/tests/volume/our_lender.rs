//! A volume over Aquifer's own lenders: acknowledged data outlives them, and they use the expected
//! RAM.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, WorkerId};
use aquifer_volume::{
    Encryption, EncryptionMode, LeaseState, LeaseTarget, NvmeAccess, Protocol, Volume, VolumeConfig,
};

use crate::common::*;

#[test]
fn acknowledged_writes_survive_a_killed_and_restarted_lender() {
    outlives_the_lender(Kind::Nbd);
}

#[test]
fn acknowledged_nvme_writes_survive_a_killed_lender() {
    outlives_the_lender(Kind::Nvme);
}

fn outlives_the_lender(kind: Kind) {
    let mut lender = OurLender::start_kind(kind, 1);
    let volume = Volume::new(config(1)).unwrap();
    volume.add_lease(lender.lease(1)).unwrap();
    let written = [const { AtomicU64::new(0) }; 3];
    thread::scope(|scope| {
        let writers: Vec<_> = written
            .iter()
            .enumerate()
            .map(|(worker, written)| {
                let volume = &volume;
                // Each thread writes its own pages again and again, while the lender is killed
                // three times.
                scope.spawn(move || {
                    for count in 0..6000 {
                        let offset = (count % 500 * 4 + worker as u64) * PAGE;
                        volume.write(WorkerId(worker), offset, &content(offset, count)).unwrap();
                        written.store(count + 1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for kill in 1..4 {
            wait_until("much is written", || written[0].load(Ordering::Relaxed) > kill * 1200);
            lender.kill();
            lender.restart();
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    for (worker, written) in written.iter().enumerate() {
        let written = written.load(Ordering::Relaxed);
        for count in written - 500..written {
            expect(&volume, (count % 500 * 4 + worker as u64) * PAGE, count);
        }
    }
    assert_eq!(volume.status().errors, 0);
}

#[test]
fn a_lender_holds_written_data_and_nothing_once_evacuated() {
    for (one, two) in [(Kind::Nbd, Kind::Nbd), (Kind::Nbd, Kind::Nvme), (Kind::Nvme, Kind::Nbd)] {
        holds_what_was_written(&OurLender::start_kind(one, 2), &OurLender::start_kind(two, 2));
    }
}

fn holds_what_was_written(first: &OurLender, second: &OurLender) {
    let volume = Volume::new(config(2)).unwrap();
    volume.add_lease(first.lease(1)).unwrap();
    assert_eq!(first.ram(), Bytes::ZERO);
    let pages: Vec<_> = (0..3000).map(|number| number * 10 * PAGE).collect();
    for offset in &pages {
        write(&volume, *offset, 1);
    }
    assert_eq!(first.ram(), Bytes(3000 * PAGE));
    assert!(pages.last().unwrap() > &EXTENT_SIZE);

    volume.add_lease(second.lease(2)).unwrap();
    volume.evacuate(LeaseId(1), |_| ()).unwrap();
    assert_eq!((first.ram(), second.ram()), (Bytes::ZERO, Bytes(3000 * PAGE)));
    for offset in &pages {
        expect(&volume, *offset, 1);
    }
    volume.discard(WorkerId(0), 0, EXTENT_SIZE).unwrap();
    assert_eq!(
        second.ram(),
        Bytes(pages.iter().filter(|offset| **offset >= EXTENT_SIZE).count() as u64 * PAGE)
    );
}

#[test]
fn a_lender_shares_encrypted_pages_only_under_one_key() {
    let lender = OurLender::start(1);
    // Each secret exists twice. Pages of zeroes are no secret.
    let secrets = || (0..100).map(|number| (number * 3 * PAGE, content(number / 2, 7)));
    let blue = Encryption { mode: EncryptionMode::Deterministic, ..Encryption::random() };
    let red = Encryption { mode: EncryptionMode::Deterministic, ..Encryption::random() };
    let mut seen: Vec<BTreeSet<Vec<u8>>> = Vec::new();
    for (encryption, apart) in [
        (&blue, 50),
        (&red, 50),
        (&Encryption { mode: EncryptionMode::Random, ..blue.clone() }, 100),
        (&blue, 50),
    ] {
        let volume = Volume::new(config(1)).unwrap();
        volume
            .add_lease(LeaseTarget { encryption: Some(encryption.clone()), ..lender.lease(2) })
            .unwrap();
        for (offset, secret) in secrets() {
            volume.write(WorkerId(0), offset, &secret).unwrap();
            volume.write(WorkerId(0), offset + PAGE, &[0; PAGE as usize]).unwrap();
        }
        for (offset, secret) in secrets() {
            assert!(read(&volume, offset) == secret);
            expect_zeroes(&volume, offset + PAGE);
        }
        let sees = lender.sees();
        assert_eq!(sees.len(), 100);
        // No 8 bytes appear as they were written.
        let pieces: BTreeSet<_> = secrets()
            .flat_map(|(_, secret)| secret.as_chunks().0.to_vec())
            .collect::<BTreeSet<[u8; 8]>>();
        assert!(
            sees.iter().all(|page| page.as_chunks().0.iter().all(|piece| !pieces.contains(piece)))
        );
        seen.push(sees.into_iter().collect());
        assert_eq!(seen.last().unwrap().len(), apart);
        volume.discard(WorkerId(0), 0, EXTENT_SIZE).unwrap();
    }
    assert_eq!(seen[0], seen[3], "the same group again");
    assert!(
        seen[0].is_disjoint(&seen[1])
            && seen[0].is_disjoint(&seen[2])
            && seen[1].is_disjoint(&seen[2])
    );
}

#[test]
fn earlier_data_in_a_namespace_is_not_visible() {
    let lender = OurLender::start_kind(Kind::Nvme, 2);
    let before = Volume::new(config(2)).unwrap();
    before.add_lease(lender.lease(1)).unwrap();
    for extent in [0, 1] {
        write(&before, extent * EXTENT_SIZE + 5 * PAGE, 1);
    }
    drop(before);
    let volume = Volume::new(config(2)).unwrap();
    volume.add_lease(lender.lease(2)).unwrap();
    for extent in [0, 1] {
        volume.write(WorkerId(0), extent * EXTENT_SIZE + 5 * PAGE, b"new").unwrap();
        assert_eq!(read(&volume, extent * EXTENT_SIZE + 5 * PAGE)[3..], [0; 4093]);
    }
}

#[test]
fn a_silent_lender_is_a_timely_error_and_is_used_again() {
    for kind in [Kind::Nbd, Kind::Nvme] {
        let lender = OurLender::start_kind(kind, 1);
        let io_timeout = Duration::from_secs(2);
        let volume = Volume::new(VolumeConfig { io_timeout, ..config(1) }).unwrap();
        volume.add_lease(lender.lease(1)).unwrap();
        write(&volume, 0, 1);
        lender.freeze();
        // All workers at once: none waits for the result of another.
        let started = Instant::now();
        thread::scope(|scope| {
            for worker in 0..4 {
                let volume = &volume;
                scope.spawn(move || {
                    let error = volume.read(WorkerId(worker), 0, &mut [0; 4096]).unwrap_err();
                    assert!(error.is_unreachable(), "{error}");
                });
            }
        });
        assert!(started.elapsed() < TIMEOUT, "{kind:?}: it took {:?}", started.elapsed());
        lender.thaw();
        wait_until("it is seen to be back", || volume.status().leases[0].state == LeaseState::Ok);
        expect(&volume, 0, 1);
    }
}

#[test]
fn a_subsystem_that_does_not_exist_is_refused_by_name() {
    let lender = OurLender::start_kind(Kind::Nvme, 1);
    let Protocol::Nvme(access) = lender.lease(1).protocol else { unreachable!() };
    let subsystem = "nqn.2014-08.org.example:nowhere".parse().unwrap();
    let protocol = Protocol::Nvme(NvmeAccess { subsystem, ..access.clone() });
    let volume = Volume::new(config(1)).unwrap();
    let refusal = |protocol| {
        let target = LeaseTarget { protocol, ..lender.lease(1) };
        volume.add_lease(target).unwrap_err().to_string()
    };
    let error = refusal(protocol);
    assert!(error.contains("lender-1") && error.contains("example:nowhere"), "{error}");
    let secrets = Some("/nonexistent/secret".into());
    let error = refusal(Protocol::Nvme(NvmeAccess { secrets, ..access }));
    assert!(error.contains("/nonexistent/secret"), "{error}");
}
