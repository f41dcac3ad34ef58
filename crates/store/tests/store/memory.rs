//! Tests that a lease takes RAM only for stored pages, and returns all of it.

use std::fs;

use aquifer_page::export::ExportError;
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};
use aquifer_store::{Store, StoreError};

use crate::common::{one_lease, record, rollup, shared_record, shm_dir, taken};

const PAGE: u64 = PAGE_SIZE as u64;
const MIB: usize = 1 << 20;

#[test]
fn a_page_takes_ram_from_its_first_byte_to_its_last() {
    let (dir, _store, lease) = one_lease(Bytes::mib(64));
    let stored = || {
        assert_eq!(lease.stored().0, taken(dir.path(), &lease));
        lease.stored().0 / PAGE
    };
    lease.write(0, &vec![0; 8 * MIB]).unwrap();
    assert_eq!(stored(), 0, "zeroes take nothing");
    lease.write(10 * PAGE + 5, &[1]).unwrap();
    assert_eq!(stored(), 1);
    lease.write(10 * PAGE, &[0; 5]).unwrap();
    lease.discard(10 * PAGE + 6, 100 * PAGE).unwrap();
    assert_eq!(stored(), 1, "one byte is left");
    lease.write(10 * PAGE + 5, &[0]).unwrap();
    assert_eq!(stored(), 0, "the last byte became zero");

    lease.write(0, &vec![1; 4 * MIB]).unwrap();
    lease.write(0, &vec![0; 2 * MIB]).unwrap();
    assert_eq!(stored(), 512);
    lease.discard(PAGE - 1, 4 * MIB as u64).unwrap();
    assert_eq!(stored(), 0);

    lease.write(5 * PAGE, &[9; PAGE_SIZE]).unwrap();
    lease.allocate_zeroes(4 * PAGE, 3 * PAGE).unwrap();
    assert_eq!(stored(), 3, "asked to be kept");
    let mut bytes = [1; 3 * PAGE_SIZE];
    lease.read(4 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 3 * PAGE_SIZE]);
}

#[test]
fn a_removed_lease_gives_all_back_even_while_somebody_has_it() {
    let (dir, store, lease) = one_lease(Bytes::mib(64));
    lease.write(0, &vec![1; 8 * MIB]).unwrap();
    assert_eq!(store.remove(lease.id()).unwrap(), Bytes::mib(8));
    assert_eq!(lease.stored(), Bytes::ZERO);
    assert!(matches!(lease.write(0, &[1]), Err(ExportError::Gone(id)) if id == lease.id()));
    assert!(matches!(lease.read(0, &mut [0]), Err(ExportError::Gone(_))));
    assert!(matches!(lease.discard(0, 1), Err(ExportError::Gone(_))));
    assert!(lease.hold(0, 1).is_err() && lease.set_note(1.into()).is_err());
    assert!(matches!(store.remove(lease.id()), Err(StoreError::Unknown(_))));
    let names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["lock"]);
}

#[test]
fn a_lease_that_could_not_be_removed_is_there_until_it_can() {
    for shared in [false, true] {
        let dir = shm_dir();
        let store = Store::open(dir.path()).unwrap();
        let size = Bytes::mib(1);
        let record = if shared { shared_record("green", size) } else { record(size, size) };
        let lease = store.create(record).unwrap();
        lease.write(0, &[1]).unwrap();
        let obstacle = dir.path().join(format!("{}.json", lease.id()));
        fs::remove_file(&obstacle).unwrap();
        // No process can unlink a directory.
        fs::create_dir(&obstacle).unwrap();
        for _ in 0..2 {
            let error = store.remove(lease.id()).unwrap_err();
            assert!(matches!(error, StoreError::File { .. }), "{error}");
        }
        fs::remove_dir(&obstacle).unwrap();
        store.remove(lease.id()).unwrap();
        assert!(store.leases().is_empty());
        let left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["lock"]);
    }
}

#[test]
fn usage_is_told_by_lease_and_by_group() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    for (group, pages) in [("red", 1), ("red", 2), ("blue", 4)] {
        let mut record = record(Bytes::mib(1), Bytes::kib(512));
        record.group = group.parse().unwrap();
        let lease = store.create(record).unwrap();
        lease.write(0, &vec![1; pages * PAGE_SIZE]).unwrap();
    }
    let usage = store.usage();
    assert_eq!((usage.stored, usage.promised), (Bytes(7 * PAGE), Bytes::kib(1536)));
    let red = usage.groups[&"red".parse().unwrap()];
    assert_eq!((red.stored, red.promised), (Bytes(3 * PAGE), Bytes::mib(1)));
    assert_eq!(usage.leases.len(), 3);
}

#[test]
fn stored_pages_are_locked_in_ram() {
    let (_dir, store, lease) = one_lease(Bytes::mib(64));
    assert!(!store.is_swappable(), "this test needs root or an unlimited RLIMIT_MEMLOCK");
    lease.write(0, &vec![1; 16 * MIB]).unwrap();
    assert!(rollup("Locked") >= Bytes::mib(16), "{}", rollup("Locked"));
}

#[test]
fn a_lease_that_cannot_be_is_refused() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    for capacity in [0, 1, PAGE + 1] {
        let refused = store.create(record(Bytes(capacity), Bytes::ZERO));
        assert!(matches!(refused, Err(StoreError::Capacity { .. })), "{capacity}");
    }
    let good = record(Bytes::mib(1), Bytes::mib(1));
    store.create(good.clone()).unwrap();
    assert!(matches!(store.create(good), Err(StoreError::Exists(_))));
    assert!(store.get(LeaseId::random()).is_none());
}
