//! The page path allocates nothing: a host swaps because it has no memory left.

use aquifer_page::{EXTENT_SIZE, LeaseId, WorkerId};
use aquifer_volume::{Encryption, LeaseTarget, SecondCopy, Volume, VolumeConfig, VolumeError};

use crate::common::*;
use crate::counting::allocations_here;

#[track_caller]
fn without_allocation(what: &str, work: impl FnOnce()) {
    let before = allocations_here();
    work();
    assert_eq!(allocations_here() - before, 0, "allocations while {what}");
}

/// Runs each operation on the page path, with sizes from one byte to more than any buffer on the
/// path.
fn exercise(volume: &Volume) {
    let data = vec![0x5a; 3 << 20];
    let mut back = vec![0; 3 << 20];
    for extent in [0, 1] {
        volume.write(WorkerId(0), extent * EXTENT_SIZE + 4 * PAGE, &data[..4096]).unwrap();
    }
    for length in [1, 4096, 8192, 65_536, 1 << 20, 3 << 20] {
        // Across the border of two lenders' extents.
        let offset = EXTENT_SIZE - length as u64 / 2;
        without_allocation("writing", || {
            volume.write(WorkerId(0), offset, &data[..length]).unwrap()
        });
        without_allocation("reading", || {
            volume.read(WorkerId(0), offset, &mut back[..length]).unwrap()
        });
        assert!(back[..length] == data[..length]);
        without_allocation("discarding", || {
            volume.discard(WorkerId(0), offset, length as u64).unwrap()
        });
        without_allocation("reading zeroes", || {
            volume.read(WorkerId(0), offset, &mut back[..length]).unwrap()
        });
    }
    without_allocation("flushing", || volume.flush(WorkerId(0)).unwrap());
    without_allocation("giving back an extent", || {
        volume.discard(WorkerId(0), 0, EXTENT_SIZE).unwrap()
    });
    without_allocation("placing it again", || volume.write(WorkerId(0), 0, &data[..4096]).unwrap());
}

#[test]
#[should_panic(expected = "allocations while boxing")]
fn an_allocation_would_be_noticed() {
    without_allocation("boxing", || drop(std::hint::black_box(Box::new(1))));
}

#[test]
fn no_page_costs_an_allocation_in_the_clear() {
    let (volume, _lenders) = volume(config(2), &[1, 1]);
    exercise(&volume);
}

#[test]
fn no_page_costs_an_allocation_over_nvme() {
    let lenders = [1, 2].map(|number| (number, OurLender::start_kind(Kind::Nvme, 1)));
    let volume = Volume::new(config(2)).unwrap();
    for (number, lender) in &lenders {
        volume.add_lease(lender.lease(*number)).unwrap();
    }
    exercise(&volume);
}

#[test]
fn no_page_costs_an_allocation_under_tls() {
    let cluster = Cluster::new();
    let lenders = [0; 2].map(|_| Nbdkit::start_tls(&cluster.dir("lender"), &["memory", "64M"]));
    let volume =
        Volume::new(VolumeConfig { tls: Some(cluster.identity("borrower")), ..config(2) }).unwrap();
    for (number, server) in lenders.iter().enumerate() {
        let target = lease(server, number as u128 + 1, 1);
        volume.add_lease(secure(target, "lender")).unwrap();
    }
    exercise(&volume);
}

#[test]
fn no_page_costs_an_allocation_when_it_is_encrypted() {
    let lenders = [lender(1), lender(1)];
    let volume = Volume::new(config(2)).unwrap();
    for (number, server) in lenders.iter().enumerate() {
        let encryption = Some(Encryption::random());
        volume
            .add_lease(LeaseTarget { encryption, ..lease(server, number as u128 + 1, 1) })
            .unwrap();
    }
    exercise(&volume);
}

#[test]
fn no_page_costs_an_allocation_with_two_copies() {
    for lags in [false, true] {
        let lenders = [(); 4].map(|()| lender(1));
        let volume = Volume::new(config(2)).unwrap();
        let target = |number: usize| LeaseTarget {
            encryption: Some(Encryption::random()),
            ..lease(&lenders[number], number as u128 + 1, 1)
        };
        for first in [0, 1] {
            volume.add_lease(target(first)).unwrap();
            let of = LeaseId(first as u128 + 1);
            let copy = SecondCopy { of, lease: target(first + 2), lags };
            volume.add_copy(copy, |_| Ok::<_, VolumeError>(())).unwrap();
        }
        wait_until("both copies are whole", || volume.repair_copies(|| true));
        exercise(&volume);
    }
}

#[test]
fn no_page_costs_an_allocation_in_the_spill_file() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let volume =
        Volume::new(VolumeConfig { spill: Some(dir.path().to_owned()), ..config(2) }).unwrap();
    exercise(&volume);
}
