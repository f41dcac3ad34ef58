//! Tests that reads return the written data, whatever happens concurrently.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_page::export::{ExportError, Segment};
use aquifer_page::{Bytes, PAGE_SIZE, is_zero};
use aquifer_store::Lease;
use proptest::prelude::*;

use crate::common::{Random, one_lease, one_shared_lease, record, shm_dir, taken};

const PAGE: u64 = PAGE_SIZE as u64;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, Vec<u8>),
    Discard(u64, u64),
    AllocateZeroes(u64, u64),
}

/// Generates a range inside `capacity`: short or long, aligned or not.
fn range(capacity: u64) -> impl Strategy<Value = (u64, u64)> {
    let any = (0..capacity, prop_oneof![1..200u64, 1..3 * PAGE, 1..capacity]);
    let aligned =
        (0..capacity / PAGE, 1..6u64).prop_map(|(page, pages)| (page * PAGE, pages * PAGE));
    prop_oneof![any, aligned]
        .prop_map(move |(offset, length)| (offset, length.min(capacity - offset)))
}

/// Generates data with whole pages of zeroes among the others.
fn data(length: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut data = vec![0; length as usize];
    for part in data.chunks_mut(PAGE_SIZE / 2) {
        if random.below(2) == 0 {
            random.fill(part);
        }
    }
    data
}

fn op(capacity: u64) -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (range(capacity), any::<u64>())
            .prop_map(|((offset, length), seed)| Op::Write(offset, data(length, seed))),
        2 => range(capacity).prop_map(|(offset, length)| Op::Discard(offset, length)),
        1 => range(capacity).prop_map(|(offset, length)| Op::AllocateZeroes(offset, length)),
    ]
}

fn apply(lease: &Lease, model: &mut [u8], op: &Op) {
    let mut fill =
        |offset: u64, length: u64| model[offset as usize..(offset + length) as usize].fill(0);
    match op {
        Op::Write(offset, data) => {
            lease.write(*offset, data).unwrap();
            model[*offset as usize..*offset as usize + data.len()].copy_from_slice(data);
        }
        Op::Discard(offset, length) => {
            lease.discard(*offset, *length).unwrap();
            fill(*offset, *length);
        }
        Op::AllocateZeroes(offset, length) => {
            lease.allocate_zeroes(*offset, *length).unwrap();
            fill(*offset, *length);
        }
    }
}

/// Returns the lease's bytes as `hold` shows them.
fn held(lease: &Lease, offset: u64, length: u64) -> Vec<u8> {
    let held = lease.hold(offset, length).unwrap();
    let mut bytes = Vec::new();
    for segment in held.segments() {
        match segment {
            Segment::Data(data) => bytes.extend_from_slice(data),
            Segment::Hole(length) => bytes.resize(bytes.len() + length, 0),
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_lease_behaves_like_an_array_of_bytes(
        ops in prop::collection::vec(op(300 * PAGE), 1..40),
        reads in prop::collection::vec(range(300 * PAGE), 5),
        shared: bool,
    ) {
        let capacity = Bytes(300 * PAGE);
        let (dir, store, lease) =
            if shared { one_shared_lease(capacity) } else { one_lease(capacity) };
        let mut model = vec![0; capacity.0 as usize];
        for op in &ops {
            apply(&lease, &mut model, op);
        }
        for (offset, length) in reads.into_iter().chain([(0, capacity.0)]) {
            let expected = &model[offset as usize..(offset + length) as usize];
            let mut bytes = vec![0xAA; length as usize];
            lease.read(offset, &mut bytes).unwrap();
            prop_assert!(bytes == expected, "read {length} at {offset}");
            prop_assert!(held(&lease, offset, length) == expected, "hold {length} at {offset}");
        }
        let runs: Vec<_> = lease.block_status(0, capacity.0).unwrap().collect();
        let stored: u64 = runs.iter().filter(|run| run.stored).map(|run| run.length).sum();
        prop_assert_eq!(runs.iter().map(|run| run.length).sum::<u64>(), capacity.0);
        prop_assert_eq!(Bytes(stored), lease.stored());
        let file_takes = taken(dir.path(), &lease);
        prop_assert_eq!(store.usage().taken.0, file_takes, "the kernel's size of the file");
        prop_assert!(shared || store.usage().taken == lease.stored());
        prop_assert_eq!(store.usage().stored, lease.stored());
        prop_assert_eq!(store.audit(), Ok(()));
    }
}

#[test]
fn threads_on_pages_of_their_own_do_not_disturb_each_other() {
    const THREADS: u64 = 4;
    let capacity = 64 * PAGE * THREADS;
    let (_dir, _store, lease) = one_lease(Bytes(capacity));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let lease = &lease;
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut model = vec![vec![0; PAGE_SIZE]; 64];
                for _ in 0..5_000 {
                    let page = random.below(64);
                    // Pages of different threads are adjacent.
                    let offset = (page * THREADS + thread) * PAGE;
                    let model = &mut model[page as usize];
                    let mut bytes = vec![0; PAGE_SIZE];
                    match random.below(4) {
                        0 => {
                            lease.discard(offset, PAGE).unwrap();
                            model.fill(0);
                        }
                        1 | 2 => {
                            let at = random.below(PAGE) as usize;
                            random.fill(&mut model[at..]);
                            lease.write(offset + at as u64, &model[at..]).unwrap();
                        }
                        _ => {
                            lease.read(offset, &mut bytes).unwrap();
                            assert!(bytes == *model, "page {page} of thread {thread}");
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn readers_see_whole_writes_and_revive_no_discarded_page() {
    let (dir, _store, lease) = one_lease(Bytes(4 * PAGE));
    write_discard_and_read(&lease);
    assert_eq!(taken(dir.path(), &lease), lease.stored().0);
    lease.discard(0, 4 * PAGE).unwrap();
    assert_eq!(taken(dir.path(), &lease), 0);
}

#[test]
fn shared_readers_see_whole_writes_and_revive_no_discard() {
    let (_dir, store, lease) = one_shared_lease(Bytes(4 * PAGE));
    write_discard_and_read(&lease);
    store.audit().unwrap();
}

fn write_discard_and_read(lease: &Lease) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for seed in 0..2 {
            let done = &done;
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..20_000 {
                    let page = random.below(4) * PAGE;
                    match random.below(3) {
                        0 => lease.discard(page, PAGE).unwrap(),
                        _ => lease.write(page, &[random.below(256) as u8; PAGE_SIZE]).unwrap(),
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
            scope.spawn(move || {
                let mut random = Random(seed);
                let mut bytes = [0; PAGE_SIZE];
                while !done.load(Ordering::Relaxed) {
                    let page = random.below(4) * PAGE;
                    lease.read(page, &mut bytes).unwrap();
                    assert!(
                        bytes.iter().all(|&byte| byte == bytes[0]),
                        "a page changes as a whole"
                    );
                    if let Some(held) = lease.try_hold(0, 4 * PAGE).unwrap() {
                        for segment in held.segments() {
                            assert!(!matches!(segment, Segment::Data(data) if is_zero(data)));
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn held_pages_do_not_change_until_they_are_released() {
    let (_dir, _store, lease) = one_lease(Bytes(8 * PAGE));
    lease.write(PAGE, &[1; PAGE_SIZE]).unwrap();
    thread::scope(|scope| {
        let held = lease.hold(0, 2 * PAGE).unwrap();
        let writer = scope.spawn(|| lease.write(0, &[2; 2 * PAGE_SIZE]).unwrap());
        scope.spawn(|| lease.write(4 * PAGE, &[3; PAGE_SIZE]).unwrap()).join().unwrap();
        assert!(!writer.is_finished());
        assert_eq!(held.segments().count(), 2);
        assert!(held.segments().any(|segment| segment == Segment::Data(&[1; PAGE_SIZE])));
        drop(held);
        writer.join().unwrap();
    });
    let mut bytes = [0; 2 * PAGE_SIZE];
    lease.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 2 * PAGE_SIZE]);
}

#[test]
fn a_full_quota_refuses_new_pages_and_only_those() {
    let dir = shm_dir();
    let store = aquifer_store::Store::open(dir.path()).unwrap();
    let lease = store.create(record(Bytes(16 * PAGE), Bytes(4 * PAGE))).unwrap();
    lease.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
    let error = lease.write(8 * PAGE, &[2]).unwrap_err();
    assert!(matches!(error, ExportError::Full { .. }));
    assert!(
        error.to_string().contains(&lease.id().to_string()) && error.to_string().contains("16KiB"),
        "{error}"
    );
    lease.write(0, &[3; 4 * PAGE_SIZE]).unwrap();
    lease.write(8 * PAGE, &[0; PAGE_SIZE]).unwrap();
    lease.discard(0, PAGE).unwrap();
    lease.write(8 * PAGE, &[2]).unwrap();
    assert_eq!(lease.stored(), lease.quota());
}

#[test]
fn requests_that_leave_the_lease_are_refused() {
    let (_dir, _store, lease) = one_lease(Bytes(PAGE));
    for (offset, length) in [(PAGE, 1), (0, PAGE + 1), (u64::MAX, 1), (1, u64::MAX)] {
        assert!(matches!(lease.discard(offset, length), Err(ExportError::Range { .. })));
        assert!(lease.block_status(offset, length).is_err() && lease.hold(offset, length).is_err());
    }
    lease.read(PAGE, &mut []).unwrap();
    lease.write(PAGE, &[]).unwrap();
    lease.discard(PAGE, 0).unwrap();
    assert!(matches!(lease.write(PAGE - 1, &[1, 2]), Err(ExportError::Range { .. })));
}
