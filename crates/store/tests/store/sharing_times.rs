//! A test that write times reveal pages of the writer's own group, and none of another group.

use std::time::Instant;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{Lease, Store};

use crate::common::{Random, shared_record, shm_dir};
use crate::rank::{CHANCE, at_best, auc, by_chance};

/// Pages of each kind.
const PAGES: u64 = 3000;
/// Kinds of pages: another group has them, no group has them, the writer's own group has them.
const KINDS: u64 = 3;
/// Passes over all pages. The machine's other work slows a page down, but rarely in every pass.
const PASSES: u64 = 5;

fn content(seed: u64, number: u64) -> [u8; PAGE_SIZE] {
    let mut content = [0; PAGE_SIZE];
    Random(seed << 32 | number).fill(&mut content);
    content
}

/// The least nanoseconds of all passes, for each page of each kind.
type Times = [Vec<u64>; KINDS as usize];

/// Runs `what` on all pages of all kinds in a pseudo-random order, and keeps the least times.
fn time(least: &mut Times, seed: u64, mut what: impl FnMut(u64) -> u64) {
    for number in by_chance(PAGES * KINDS, seed) {
        let least = &mut least[(number % KINDS) as usize][(number / KINDS) as usize];
        *least = what(number).min(*least);
    }
}

fn write(lease: &Lease, number: u64, content: &[u8]) -> u64 {
    let began = Instant::now();
    lease.write(number * PAGE_SIZE as u64, content).unwrap();
    began.elapsed().as_nanos() as u64
}

/// Compares pages of another group, and of the own group, with pages that no group has.
///
/// Returns the ranks for the first write, the read and the second write.
fn compared(round: u64) -> [(f64, f64); 3] {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let lease = |group: &str| store.create(shared_record(group, Bytes::mib(64))).unwrap();
    let (victim, mate, attacker) = (lease("blue"), lease("red"), lease("red"));
    for number in 0..PAGES * KINDS {
        match number % KINDS {
            0 => drop(write(&victim, number, &content(1, number))),
            2 => drop(write(&mate, number, &content(1, number))),
            _ => {}
        }
    }
    let saved = |group: &str| store.usage().groups[&group.parse().unwrap()].shared.saved.pages();
    let mut page = [0; PAGE_SIZE];
    let [mut written, mut read, mut again] =
        [(); 3].map(|()| [(); 3].map(|()| vec![u64::MAX; PAGES as usize]));
    for pass in 0..PASSES {
        let seed = 2 * (round * PASSES + pass);
        time(&mut written, seed, |number| write(&attacker, number, &content(1, number)));
        assert_eq!((saved("red"), saved("blue")), (PAGES, 0));
        time(&mut read, seed, |number| {
            let began = Instant::now();
            attacker.read(number * PAGE_SIZE as u64, &mut page).unwrap();
            let took = began.elapsed().as_nanos() as u64;
            assert!(page == content(1, number));
            took
        });
        // Contents that no group has, different in each pass.
        time(&mut again, seed, |number| write(&attacker, number, &content(2 + pass, number)));
        assert_eq!((saved("red"), saved("blue")), (0, 0));
    }
    store.audit().unwrap();
    [written, read, again].map(|[other, nobody, own]| (auc(&other, &nobody), auc(&own, &nobody)))
}

#[test]
fn times_tell_what_the_own_group_has_and_nothing_of_another() {
    at_best(compared, |found| {
        let same = found.iter().all(|(other, _)| (other - 0.5).abs() < CHANCE);
        // A group's own pages need no copy, and the test must be sensitive enough to see that.
        same && (found[0].1 - 0.5).abs() > 0.15
    });
}
