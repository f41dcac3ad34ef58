//! A model test: threads run all operations on leases that share pages, with pauses to check
//! contents and counts.
//!
//! `AQUIFER_OPERATIONS` sets the number of operations (500000 by default), `AQUIFER_SEED` the seed.

mod model;
mod worker;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{Lease, SharedUsage, Store};
use model::contents;
use worker::{PAGES, Worker};

use crate::common::{Random, frames_taken, shared_record, shm_dir};

const PAGE: u64 = PAGE_SIZE as u64;
const THREADS: usize = 4;
const GROUPS: [&str; 2] = ["red", "blue"];
/// Leases of each group in which every thread has a part, besides each thread's own lease.
const COMMON: usize = 3;
/// How many times the threads pause for a check.
const QUIET: u64 = 20;

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Creates the leases in which every thread has a part.
fn create_common(store: &Store) -> Vec<Arc<Lease>> {
    let capacity = Bytes(THREADS as u64 * PAGES as u64 * PAGE);
    let all = GROUPS.iter().flat_map(|group| (0..COMMON).map(move |_| group));
    all.map(|group| store.create(shared_record(group, capacity)).unwrap()).collect()
}

#[test]
fn whatever_is_done_contents_and_counts_stay_right() {
    let (operations, seed) = (variable("AQUIFER_OPERATIONS", 500_000), variable("AQUIFER_SEED", 1));
    let began = Instant::now();
    let dir = shm_dir();
    let contents = contents();
    let mut store = Store::open(dir.path()).unwrap();
    let mut common = create_common(&store);
    let mut workers: Vec<_> =
        (0..THREADS).map(|thread| Worker::new(thread, seed, &store, &common, &contents)).collect();
    let mut random = Random(seed);
    let mut broken = false;
    for round in 0..QUIET {
        let each = operations * (round + 1) / QUIET - operations * round / QUIET;
        thread::scope(|scope| {
            for worker in &mut workers {
                let store = &store;
                scope.spawn(move || worker.run(store, each / THREADS as u64));
            }
        });
        broken |= check(dir.path(), &store, &workers) > 0;
        match random.below(4) {
            0 => {
                // As after a crash: only the files remain.
                workers.iter_mut().for_each(Worker::let_go);
                drop((std::mem::take(&mut common), store));
                store = Store::open(dir.path()).unwrap();
                assert!(store.findings().is_empty(), "{:?}", store.findings());
                workers.iter_mut().for_each(|worker| worker.find_again(&store));
                check(dir.path(), &store, &workers);
            }
            1 => {
                let (which, group) = workers[0].any_common(&mut random);
                store.remove(workers[0].id(which)).unwrap();
                let record = shared_record(group, Bytes(THREADS as u64 * PAGES as u64 * PAGE));
                let lease = store.create(record).unwrap();
                workers.iter_mut().for_each(|worker| worker.replace(which, Arc::clone(&lease)));
                check(dir.path(), &store, &workers);
            }
            _ => {}
        }
    }
    println!("{operations} operations in {:.1?}", began.elapsed());
    assert!(broken, "nothing was shared and then written");
    for lease in store.leases() {
        store.remove(lease.id()).unwrap();
    }
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["lock"]);
}

/// Compares contents, counts and figures with the models while no thread runs.
///
/// Returns the number of copy-on-write breaks since the store was opened.
fn check(dir: &Path, store: &Store, workers: &[Worker<'_>]) -> u64 {
    workers.iter().for_each(Worker::check);
    store.audit().unwrap();
    let mut distinct: BTreeMap<&str, HashSet<&[u8]>> = BTreeMap::new();
    let mut repeated: BTreeMap<&str, HashSet<&[u8]>> = BTreeMap::new();
    let mut stored: BTreeMap<&str, u64> = BTreeMap::new();
    for (group, content) in workers.iter().flat_map(Worker::stored) {
        if !distinct.entry(group).or_default().insert(content) {
            repeated.entry(group).or_default().insert(content);
        }
        *stored.entry(group).or_default() += 1;
    }
    let usage = store.usage();
    let mut breaks = 0;
    for group in GROUPS {
        let counted = usage.groups[&group.parse().unwrap()];
        let pages = |count: Option<usize>| Bytes(count.unwrap_or(0) as u64 * PAGE);
        let logical = pages(stored.get(group).map(|&count| count as usize));
        let frames = pages(distinct.get(group).map(HashSet::len));
        let expected = SharedUsage {
            stored: logical,
            taken: frames_taken(dir, group),
            saved: logical - frames,
            shared_frames: repeated.get(group).map_or(0, HashSet::len) as u64,
            breaks: counted.shared.breaks,
        };
        assert_eq!(counted.shared, expected);
        assert_eq!((counted.stored, counted.taken), (logical, expected.taken));
        assert!(expected.taken < frames + Bytes::mib(3), "{} for {frames}", expected.taken);
        breaks += counted.shared.breaks;
    }
    assert_eq!(usage.taken, usage.groups.values().map(|group| group.taken).sum());
    breaks
}
