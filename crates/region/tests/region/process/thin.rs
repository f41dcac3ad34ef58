//! Regions whose leases are smaller than they are.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_region::PolicyKind;
use aquifer_region::process::client;
use aquifer_region_client::Run;

use super::*;
use crate::common::pool::OurLender;

/// A cache that needs one extent at a lender, and has some pages of that extent too.
const PART: Bytes = Bytes(2 * EXTENT_SIZE + (8 << 20));

/// A cache that needs two extents at lenders.
const LEAST: Bytes = Bytes(EXTENT_SIZE + (8 << 20));

const PAGES: u64 = SIZE.0 / PAGE_SIZE as u64;

/// Returns a region without leases, in which every page has this number in each word that is used.
fn filled(version: u64) -> Served {
    filled_under(PolicyKind::default(), version)
}

fn filled_under(policy: PolicyKind, version: u64) -> Served {
    let served = Served::with(|spec| {
        (spec.auto, spec.began_local) = (true, true);
        (spec.cache, spec.paging.policy) = (spec.size, policy);
    });
    served.mark(version);
    served
}

impl Served {
    /// Writes one word of each page.
    fn mark(&self, version: u64) {
        (0..PAGES).for_each(|page| {
            self.word(page, 3).store(page << 32 | version, Ordering::Relaxed);
        });
    }

    #[track_caller]
    fn is_marked(&self, version: u64) {
        for page in 0..PAGES {
            let is = self.word(page, 3).load(Ordering::Relaxed);
            assert_eq!(is, page << 32 | version, "page {page}");
        }
    }

    fn limit(&self, cache: Bytes) -> Result<(), String> {
        client::resize_cache(&self.files, cache, client::By::Agent)
            .map_err(|error| error.to_string())
    }
}

fn one_extent<const N: usize>() -> [OurLender; N] {
    std::array::from_fn(|_| OurLender::start(1))
}

/// Returns such a region with two leases, of an extent each.
fn with_two(version: u64) -> ([OurLender; 2], Served) {
    let (lenders, served) = (one_extent(), filled(version));
    (1..).zip(&lenders).for_each(|(number, lender): (u128, &OurLender)| {
        served.add(lender.lease(number)).unwrap();
    });
    (lenders, served)
}

#[test]
fn a_region_runs_with_less_at_lenders_than_its_size() {
    if cannot_run() {
        return;
    }
    let ([one], served) = (one_extent(), filled(1));
    served.add(one.lease(1)).unwrap();
    let refused = served.limit(Bytes(2 * EXTENT_SIZE)).unwrap_err();
    assert!(refused.contains("a cache below 132MiB would stop its programs"), "{refused}");
    served.limit(PART).unwrap();
    let usage = served.status().usage;
    assert!(usage.resident <= PART && usage.remote >= SIZE.saturating_sub(PART), "{usage:?}");
    // Each pass needs each page, so pages of all extents want to be in the cache in turn.
    for version in 2..5 {
        served.is_marked(version - 1);
        served.mark(version);
    }
    assert_eq!(served.status().counts.stalled_faults, 0);
    served.kill_engine();
    served.is_marked(4);
    let status = served.status();
    assert_eq!((status.counts.stalled_faults, status.waiting), (0, 0));
    assert_eq!(status.volume.placed_extents, 1);
    assert!(status.usage.resident <= PART, "{:?}", status.usage);
}

#[test]
fn a_second_lease_lets_the_cache_shrink_further() {
    if cannot_run() {
        return;
    }
    let ([one, two], served) = (one_extent(), filled(1));
    served.add(one.lease(1)).unwrap();
    served.limit(PART).unwrap();
    served.add(two.lease(2)).unwrap();
    let less = PART.saturating_sub(Bytes(EXTENT_SIZE));
    served.limit(less).unwrap();
    served.is_marked(1);
    served.mark(2);
    served.kill_all();
    served.is_marked(2);
    let status = served.status();
    assert!(status.usage.resident <= less, "{:?}", status.usage);
    assert_eq!(status.volume.placed_extents, 2);
}

#[test]
fn pages_of_one_lease_come_home_while_others_stay() {
    if cannot_run() {
        return;
    }
    let ([one, _two], served) = with_two(1);
    served.limit(LEAST).unwrap();
    let refused = served.evacuate(1).unwrap_err();
    assert!(refused.contains("no lease has room"), "{refused}");
    // A cache with room for the pages of the first lease, but not for those of the second.
    served.limit(PART).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let program = scope.spawn(|| {
            let mut version = 1;
            while !stop.load(Ordering::Relaxed) {
                served.is_marked(version);
                version += 1;
                served.mark(version);
            }
            version
        });
        let moved = served.evacuate(1);
        stop.store(true, Ordering::Relaxed);
        let version = program.join().unwrap();
        moved.unwrap();
        served.is_marked(version);
        served.mark(7);
    });
    assert_eq!(served.leases(), [2]);
    assert_eq!(one.ram(), Bytes::ZERO, "the lender has its memory back");
    let refused = served.limit(LEAST).unwrap_err();
    assert!(refused.contains("would stop its programs"), "{refused}");
    drop(one);
    served.kill_engine();
    served.is_marked(7);
    assert!(served.status().usage.resident <= PART);
}

#[test]
fn a_lease_stays_if_its_region_could_not_go_on_without_it() {
    if cannot_run() {
        return;
    }
    let (_lenders, served) = with_two(0);
    // Two extents hold nothing, so the first lease could take all that leaves.
    let page = Run { first: PAGES / 3, count: PAGES - PAGES / 3 };
    client::drop_pages(&served.files, page).unwrap();
    served.limit(LEAST).unwrap();
    assert!(served.evacuate(2).is_err(), "all pages may be touched again");
    served.mark(1);
    served.is_marked(1);
    assert_eq!(served.leases(), [1, 2]);
    assert!(served.status().usage.resident <= LEAST);
}

#[test]
fn a_lease_that_must_stay_gives_what_others_have_room_for() {
    if cannot_run() {
        return;
    }
    let [one, two] = std::array::from_fn(|_| OurLender::start(2));
    let served = Served::new(&[one.lease(1), two.lease(2)]);
    served.write_all(1);
    let used = |lease: usize| served.status().volume.leases[lease].used_extents;
    wait_until("all extents have a place", || used(0) + used(1) == EXTENTS);
    let from = if used(0) == 2 { 0 } else { 1 };
    assert!(served.evacuate(from as u128 + 1).is_err(), "two extents have no place for three");
    assert_eq!([used(from), used(1 - from)], [1, 2]);
    assert_eq!(served.leases(), [1, 2]);
    served.check_all(1);
    served.write_all(2);
    served.check_all(2);
}

#[test]
fn the_policy_chooses_the_extents_that_get_a_place() {
    if cannot_run() {
        return;
    }
    let (lender, served) = (OurLender::start(2), filled_under(PolicyKind::Random, 1));
    served.add(lender.lease(1)).unwrap();
    served.limit(PART).unwrap();
    let status = served.status();
    assert_eq!(status.volume.placed_extents, 2, "not all pages of one");
    served.is_marked(1);
    served.mark(2);
    served.is_marked(2);
    assert_eq!(served.status().counts.stalled_faults, 0);
}

#[test]
fn an_engine_killed_while_pages_come_home_loses_none() {
    if cannot_run() {
        return;
    }
    let ([one, _two], served) = with_two(1);
    served.limit(LEAST).unwrap();
    served.mark(2);
    served.limit(PART).unwrap();
    let mut killed = false;
    let moved = client::evacuate(&served.files, LeaseId(1), None, |_| {
        if !killed && let Ok(status) = client::status(&served.files) {
            killed = true;
            kill(status.pid);
        }
    });
    wait_until("the lease is evacuated", || moved.is_ok() || served.evacuate(1).is_ok());
    assert!(killed);
    served.is_marked(2);
    assert_eq!(served.leases(), [2]);
    assert_eq!(one.ram(), Bytes::ZERO, "the lender has its memory back");
}
