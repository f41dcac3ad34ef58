//! A region behaves like memory under every policy and scheme, while pages leave and come back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_region::{PolicyKind, Scheme};
use aquifer_region_client::Region;

use crate::common::pool::Random;
use crate::common::{PAGE, Setting};

const PAGES: u64 = 4096;
const FRAMES: u64 = 512;
const WORDS: usize = PAGE_SIZE / 8;

/// Returns the number of operations of each of four threads, for each policy and scheme.
/// `AQUIFER_OPERATIONS` overrides it.
fn operations() -> u64 {
    std::env::var("AQUIFER_OPERATIONS").map_or(5_000, |number| number.parse().unwrap())
}

/// Returns the word at this index of a page, for a version; zero for a page that was never written.
fn word(page: u64, version: u64, at: usize) -> u64 {
    if version == 0 {
        0
    } else {
        (page << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64
    }
}

fn write(region: &Region, page: u64, version: u64) {
    let words = &region.words()[page as usize * WORDS..][..WORDS];
    words
        .iter()
        .enumerate()
        .for_each(|(at, is)| is.store(word(page, version, at), Ordering::Relaxed));
}

fn check(region: &Region, page: u64, version: u64) {
    let words = &region.words()[page as usize * WORDS..][..WORDS];
    for (at, is) in words.iter().enumerate() {
        let (is, should) = (is.load(Ordering::Relaxed), word(page, version, at));
        assert_eq!(is, should, "page {page}, word {at}, version {version}");
    }
}

/// Reads, writes and discards from several threads, each on pages of its own. The threads' pages
/// are interleaved.
fn exercise(region: &Region, threads: u64, operations: u64, seed: u64) {
    thread::scope(|scope| {
        for me in 0..threads {
            scope.spawn(move || {
                let mut random = Random(seed + me * 77_777 + 1);
                let mut versions = vec![0; (PAGES / threads) as usize];
                for number in 1..=operations {
                    // Half of the operations go to an eighth of the pages, so that some are touched
                    // often.
                    let count = PAGES / threads;
                    let own = if random.below(2) == 0 {
                        random.below(count / 8)
                    } else {
                        random.below(count)
                    };
                    let page = own * threads + me;
                    let version = &mut versions[own as usize];
                    match random.below(20) {
                        0 => {
                            region.discard(page..page + 1).unwrap();
                            *version = 0;
                        }
                        1..=7 => {
                            *version = number;
                            write(region, page, number);
                        }
                        _ => check(region, page, *version),
                    }
                }
                for (own, version) in versions.iter().enumerate() {
                    check(region, own as u64 * threads + me, *version);
                }
            });
        }
    });
}

fn is_memory(policy: PolicyKind, scheme: Scheme) {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, policy, scheme);
    let region = setting.map();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(5);
            while !done.load(Ordering::Relaxed) {
                let frames = 128 + random.below(FRAMES);
                serving.engine.resize_cache(Bytes(frames * PAGE)).unwrap();
                if frames.is_multiple_of(8) {
                    serving.engine.persist().unwrap();
                }
                let usage = serving.engine.usage();
                assert!(usage.resident.0 <= frames * PAGE + 64 * PAGE, "{usage:?}");
                thread::sleep(std::time::Duration::from_millis(20));
            }
        });
        let exercised = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            exercise(&region, 4, operations(), 99);
        }));
        done.store(true, Ordering::Relaxed);
        exercised.unwrap();
    });
    let (counts, usage) = (serving.engine.counts(), serving.engine.usage());
    eprintln!("{policy} {scheme:?}: {counts:?} {usage:?}");
    assert!(
        counts.remote_faults > 1000 && counts.evicted > 1000 && counts.written_back > 1000,
        "{counts:?}"
    );
    assert!(counts.written_back < counts.evicted, "clean pages leave without a write: {counts:?}");
    assert_eq!(usage.size, usage.resident + usage.remote + usage.zero);
}

#[test]
fn with_every_policy_and_frames_kept_free() {
    PolicyKind::ALL.iter().for_each(|(policy, _)| is_memory(*policy, Scheme::PreEvict));
}

#[test]
fn with_every_policy_on_demand() {
    PolicyKind::ALL.iter().for_each(|(policy, _)| is_memory(*policy, Scheme::OnDemand));
}

#[test]
fn discarded_pages_take_nothing_anywhere() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    (0..PAGES).for_each(|page| write(&region, page, 1));
    assert!(setting.lender.ram() >= Bytes((PAGES - FRAMES) * PAGE));
    region.discard(0..PAGES).unwrap();
    assert_eq!(serving.engine.usage().zero, Bytes(PAGES * PAGE));
    assert_eq!(setting.lender.ram(), Bytes::ZERO);
    (0..PAGES).for_each(|page| check(&region, page, 0));
}

#[test]
fn pages_of_zeroes_are_kept_nowhere() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    (0..PAGES).for_each(|page| check(&region, page, 0));
    assert_eq!(setting.lender.ram(), Bytes::ZERO);
    assert_eq!(serving.engine.usage().remote, Bytes::ZERO);
    assert!(serving.engine.counts().found_zero > 0);
}

#[test]
fn persisted_pages_leave_without_a_write() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    (0..FRAMES / 2).for_each(|page| write(&region, page, 1));
    serving.engine.persist().unwrap();
    let written = serving.engine.counts().written_back;
    assert_eq!(written, FRAMES / 2);
    assert_eq!(setting.lender.ram(), Bytes(written * PAGE));
    // Lenders do not have the zero pages that a scan brought in advance.
    assert_eq!(serving.engine.usage().dirty, Bytes(serving.engine.counts().found_zero * PAGE));
    // The engine notices later touches and writes.
    (0..8).for_each(|page| write(&region, page, 2));
    (8..16).for_each(|page| check(&region, page, 1));
    serving.engine.resize_cache(Bytes(64 * PAGE)).unwrap();
    assert!(serving.engine.counts().written_back <= written + 8);
    (0..FRAMES / 2).for_each(|page| check(&region, page, if page < 8 { 2 } else { 1 }));
}

/// Write-back finds dirty pages that are about to be mapped, evicted or discarded.
#[test]
fn pages_written_back_repeatedly_are_kept() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                serving.engine.persist().unwrap();
            }
        });
        let exercised = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            exercise(&region, 4, 4 * operations(), 31);
        }));
        done.store(true, Ordering::Relaxed);
        exercised.unwrap();
    });
}

#[test]
fn a_scan_is_seen_and_its_pages_brought_before_they_are_touched() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    (0..FRAMES / 2).for_each(|page| write(&region, page, 1));
    let new = serving.engine.counts();
    assert!(new.zeroed > FRAMES / 4 && new.zero_faults < FRAMES / 8, "{new:?}");
    (FRAMES / 2..PAGES).for_each(|page| write(&region, page, 1));
    let before = serving.engine.counts();
    (0..PAGES).for_each(|page| check(&region, page, 1));
    let after = serving.engine.counts();
    let fetched = after.remote_faults - before.remote_faults;
    assert!(after.prefetched > PAGES / 2 && fetched < PAGES / 8, "{after:?}");
}

#[test]
fn a_region_outlives_its_programs() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    (0..PAGES).for_each(|page| write(&region, page, 3));
    drop(region);
    crate::common::pool::wait_until("the engine knows", || serving.engine.mapped_by().is_empty());
    let region = setting.map();
    (0..PAGES).for_each(|page| check(&region, page, 3));
    // Written while one program has it, read while two have it.
    let second = setting.map();
    (0..PAGES).step_by(3).for_each(|page| write(&region, page, 4));
    (0..PAGES).for_each(|page| check(&second, page, if page % 3 == 0 { 4 } else { 3 }));
}
