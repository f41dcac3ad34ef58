//! Prefetchers against traces of pages, in a cache with FIFO eviction.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

use super::{Account, MOST, PrefetchKind, Prefetcher, Proven};

/// A cache of pages.
struct Cache {
    frames: usize,
    order: VecDeque<u64>,
    /// The present pages. The value is true if the page was prefetched, with no known touch since.
    here: HashMap<u64, bool>,
    prefetcher: Option<Box<dyn Prefetcher>>,
    account: Account,
    faults: u64,
    fetched: u64,
}

impl Cache {
    fn new(kind: PrefetchKind, frames: usize) -> Self {
        let (order, here, account) = (VecDeque::new(), HashMap::new(), Account::default());
        Self { frames, order, here, prefetcher: kind.make(), account, faults: 0, fetched: 0 }
    }

    fn bring(&mut self, page: u64, early: bool) {
        if self.order.len() == self.frames
            && let Some(oldest) = self.order.pop_front()
            && self.here.remove(&oldest) == Some(true)
        {
            self.account.wasted(1);
        }
        self.order.push_back(page);
        self.here.insert(page, early);
    }

    /// Touches a page. The prefetcher sees only touches of absent pages.
    fn touch(&mut self, page: u64) {
        if self.here.contains_key(&page) {
            return;
        }
        self.faults += 1;
        self.bring(page, false);
        let Some(prefetcher) = &mut self.prefetcher else { return };
        for page in prefetcher.proven(page).into_iter().flat_map(Proven::pages) {
            if self.here.get_mut(&page).is_some_and(std::mem::take) {
                self.account.used(1);
            }
        }
        let (account, frames) = (RefCell::new(&mut self.account), self.frames as u64);
        let open = MOST.max(frames / 64).min(frames / 8);
        let most = || if account.borrow_mut().allows(open) { MOST.min(frames / 16) } else { 0 };
        for page in prefetcher.after(page, &most).into_iter().flat_map(|guess| guess.pages(page)) {
            if !self.here.contains_key(&page) {
                self.fetched += 1;
                self.account.fetched(1);
                self.bring(page, true);
            }
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn unit(&mut self) -> f64 {
        self.next() as f64 / (1_u64 << 53) as f64
    }
}

const OBJECTS: u64 = 20_000;

/// Returns the first and last page of an object of 6.4 KB, as in a key-value store. Objects lie in
/// no order of popularity.
fn object(rank: u64) -> std::ops::RangeInclusive<u64> {
    let at = rank * 7919 % OBJECTS;
    at * 6554 / 4096..=(at * 6554 + 6553) / 4096
}

/// Returns pages of objects drawn by Zipf's law with exponent 1.
fn zipf(gets: usize) -> impl Iterator<Item = u64> {
    let mut random = Random(42);
    // The inverse of the harmonic sum, approximated by a logarithm.
    let rank = move |_| ((OBJECTS as f64 + 1.0).powf(random.unit()) - 1.0) as u64;
    (0..gets).map(rank).flat_map(|rank| object(rank.min(OBJECTS - 1)))
}

#[test]
fn small_objects_touched_at_random_are_not_prefetched() {
    let frames = OBJECTS as usize * 6554 / 4096 / 6;
    for kind in [PrefetchKind::Sequential, PrefetchKind::Trend, PrefetchKind::Auto] {
        let mut off = Cache::new(PrefetchKind::Off, frames);
        let mut cache = Cache::new(kind, frames);
        zipf(100_000).for_each(|page| {
            off.touch(page);
            cache.touch(page);
        });
        eprintln!(
            "{kind}: {} faults, {} fetched; off: {} faults",
            cache.faults, cache.fetched, off.faults
        );
        assert!(
            cache.faults > 10_000 && cache.fetched * 100 < cache.faults,
            "{kind}: {}",
            cache.fetched
        );
        assert!(
            cache.faults * 100 < off.faults * 101,
            "{kind}: {} and {}",
            cache.faults,
            off.faults
        );
    }
}

#[test]
fn a_false_pattern_costs_little() {
    for kind in [PrefetchKind::Sequential, PrefetchKind::Trend, PrefetchKind::Auto] {
        let mut cache = Cache::new(kind, 4096);
        let mut random = Random(7);
        for _ in 0..50_000 {
            // Just long enough to prove a stream.
            let first = random.next() % 10_000_000;
            (first..first + 4).for_each(|page| cache.touch(page));
        }
        assert!(
            cache.fetched * 50 < cache.faults,
            "{kind}: {} for {}",
            cache.fetched,
            cache.faults
        );
    }
}

#[test]
fn a_scan_is_prefetched_also_after_all_was_by_chance() {
    for kind in [PrefetchKind::Sequential, PrefetchKind::Trend, PrefetchKind::Auto] {
        let mut cache = Cache::new(kind, 4096);
        (0..20_000).for_each(|page| cache.touch(page));
        assert!(cache.faults * 20 < 20_000, "{kind}: {}", cache.faults);
        let mut random = Random(7);
        for _ in 0..20_000 {
            let first = (1 << 30) + random.next() % 10_000_000;
            (first..first + 4).for_each(|page| cache.touch(page));
        }
        let before = cache.faults;
        (0..20_000).for_each(|page| cache.touch(page));
        assert!((cache.faults - before) * 8 < 20_000, "{kind}: {}", cache.faults - before);
    }
}

#[test]
fn scans_one_after_the_other_are_prefetched_however_short() {
    let mut cache = Cache::new(PrefetchKind::Auto, 4096);
    for scan in 0..500 {
        let first = scan * 100_000;
        (first..first + 256).for_each(|page| cache.touch(page));
    }
    assert!(cache.faults * 8 < 500 * 256, "{}", cache.faults);
}
