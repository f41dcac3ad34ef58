//! Regions with a cache as large as themselves, which nobody watches until a page must leave.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_page::{HUGE_PAGE_SIZE, PageIndex};
use aquifer_region::Proposal;
use aquifer_region::process::View;
use aquifer_region::process::client::By;

use super::*;

/// The region's size in pages.
const PAGES: u64 = EXTENTS * EXTENT_SIZE / PAGE_SIZE as u64;

fn has_huge_pages() -> bool {
    Path::new("/sys/kernel/mm/transparent_hugepage").exists()
}

/// Returns the memory that the first pages of a region take once they were touched.
fn taken(pages: u64) -> Bytes {
    let huge = (HUGE_PAGE_SIZE / PAGE_SIZE) as u64;
    Bytes(if has_huge_pages() { pages.next_multiple_of(huge) } else { pages } * PAGE_SIZE as u64)
}

fn auto() -> Served {
    Served::with(|spec| {
        (spec.auto, spec.began_local) = (true, true);
        spec.cache = spec.size;
    })
}

impl Served {
    fn fill(&self, pages: std::ops::Range<u64>, seed: u64) {
        pages.for_each(|page| self.word(page, 7).store(page + seed, Ordering::Relaxed));
    }

    #[track_caller]
    fn has(&self, pages: std::ops::Range<u64>, seed: u64) {
        let wrong: Vec<u64> = pages
            .filter(|page| self.word(*page, 7).load(Ordering::Relaxed) != page + seed)
            .collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    fn resize(&self, cache: Bytes) -> Result<(), String> {
        client::resize_cache(&self.files, cache, By::Agent).map_err(|error| error.to_string())
    }

    fn faults(&self) -> u64 {
        let counts = self.status().counts;
        counts.zero_faults + counts.remote_faults + counts.late_faults + counts.zeroed
    }
}

#[test]
fn the_kernel_alone_serves_a_region_that_fits_its_cache() {
    let served = auto();
    served.fill(0..USED, 1);
    served.has(0..USED, 1);
    let status = served.status();
    let used = taken(USED);
    assert_eq!((served.faults(), status.usage.resident, status.usage.dirty), (0, used, used));
    assert_eq!(status.usage.zero, status.usage.size.saturating_sub(used));
    assert_eq!(status.volume.leases.len(), 0);
    let refused = served.resize(CACHE).unwrap_err();
    assert!(refused.contains("too little memory at lenders"), "{refused}");
    assert_eq!(served.status().usage.cache, status.usage.size);
    // A limit of all regions together cannot be met either, and says by which region.
    let file = served.files.region();
    let directory = file.parent().unwrap();
    let limited = client::limit(directory, None, Some(CACHE)).unwrap_err().to_string();
    let name = &served.status().spec.name;
    assert!(limited.starts_with(&format!("region '{name}': the region has too")), "{limited}");
    served.has(0..USED, 1);
}

#[test]
fn a_scanner_sees_the_pages_that_nobody_watches() {
    let served = auto();
    served.fill(0..USED, 1);
    served.fill(PAGES - 1..PAGES, 1);
    let mut view = View::open(&served.files).unwrap();
    let here = |view: &View| -> Vec<u64> {
        (0..PAGES).filter(|page| view.is_here(PageIndex(*page))).collect()
    };
    let before = here(&view);
    let bytes = Bytes(before.len() as u64 * PAGE_SIZE as u64);
    assert_eq!(bytes, served.status().usage.resident, "{before:?}");
    assert!((0..USED).chain([PAGES - 1]).all(|page| before.contains(&page)), "{before:?}");
    // A page that comes after a look is seen at the next one.
    let middle = PAGES / 2;
    served.fill(middle..middle + 1, 1);
    view.look();
    assert!(here(&view).contains(&middle));
    // A proposal lets the engine watch: from then on the table says which pages are here. The
    // proposal itself fails, as no scanner has made frames.
    let proposal = Proposal { page: PageIndex(middle), frame: None };
    assert!(client::share(&served.files, vec![proposal]).is_err());
    assert!(served.files.region().with_file_name(".items").join("watched").exists());
    let now = here(&view);
    view.look();
    assert_eq!(here(&view), now);
    assert!(now.starts_with(&before[..USED as usize]) && now.contains(&middle), "{now:?}");
    served.has(0..USED, 1);
}

#[test]
fn a_status_has_all_pages_while_the_engine_begins_to_watch() {
    let served = auto();
    served.fill(0..USED, 1);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asks = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let usage = served.status().usage;
                assert!(usage.resident.pages() >= USED, "{usage:?}");
            }
        });
        let proposal = Proposal { page: PageIndex(0), frame: None };
        let refused = client::share(&served.files, vec![proposal]);
        is_over.store(true, Ordering::Relaxed);
        asks.join().unwrap();
        assert!(refused.is_err());
    });
}

#[test]
fn discarded_pages_of_an_unwatched_region_are_zero() {
    let served = auto();
    served.fill(0..USED, 1);
    served.region.as_ref().unwrap().discard(10..20).unwrap();
    let left = taken(USED).saturating_sub(Bytes(10 * PAGE_SIZE as u64));
    assert_eq!(served.status().usage.resident, left);
    (10..20).for_each(|page| assert_eq!(served.word(page, 7).load(Ordering::Relaxed), 0));
    served.has(20..USED, 1);
    client::drop_pages(&served.files, client::all_pages(&served.files).unwrap()).unwrap();
    assert_eq!(served.status().usage.resident, Bytes::ZERO);
    assert_eq!(served.word(30, 7).load(Ordering::Relaxed), 0);
}

#[test]
fn pages_of_an_unwatched_region_leave_once_it_has_a_lease() {
    let lender = OurLender::start(EXTENTS);
    let served = auto();
    served.fill(0..USED, 1);
    served.add(lender.lease(1)).unwrap();
    served.fill(USED..2 * USED, 1);
    served.resize(CACHE).unwrap();
    let usage = served.status().usage;
    assert!(usage.resident <= CACHE && usage.remote > Bytes::ZERO, "{usage:?}");
    served.has(0..2 * USED, 1);
    served.fill(0..2 * USED, 2);
    served.has(0..2 * USED, 2);
    // Pages that were never touched, after the change.
    served.fill(2 * USED..3 * USED, 2);
    served.has(0..3 * USED, 2);
    served.kill_engine();
    served.has(0..3 * USED, 2);
    // All pages fit again.
    served.resize(Bytes(PAGES * PAGE_SIZE as u64)).unwrap();
    served.has(0..3 * USED, 2);
    served.kill_engine();
    served.has(0..3 * USED, 2);
}

#[test]
fn writes_go_on_while_a_region_begins_to_be_watched() {
    for round in 0..4 {
        let lender = OurLender::start(EXTENTS);
        let served = auto();
        served.add(lender.lease(1)).unwrap();
        let stop = AtomicBool::new(false);
        let passes = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut pass = 0;
                while !stop.load(Ordering::Relaxed) {
                    pass += 1;
                    // Each pass touches pages that no pass before it did.
                    let end = PAGES.min(USED + pass * 8);
                    (0..end).for_each(|page| {
                        bump(served.word(page, 7), page, pass, USED);
                    });
                }
                pass
            });
            // Engines die before, during and after the change.
            let change = scope.spawn(|| {
                if round % 2 == 1 {
                    served.kill_engine();
                }
                served.resize(CACHE).unwrap();
                served.kill_engine();
                wait_until("the cache is within its limit", || {
                    client::status(&served.files).is_ok_and(|it| it.usage.resident <= CACHE)
                });
            });
            let changed = change.join();
            stop.store(true, Ordering::Relaxed);
            let passes = writer.join().unwrap();
            changed.unwrap();
            passes
        });
        for page in 0..PAGES.min(USED + passes * 8) {
            let first = if page < USED { 1 } else { (page - USED) / 8 + 1 };
            let is = served.word(page, 7).load(Ordering::Relaxed);
            assert_eq!(is, page * 1_000_000 + passes - first + 1, "page {page} of {passes} passes");
        }
    }
}

/// Counts one more pass in a page, and checks the count before. A lost write shows at once.
fn bump(word: &std::sync::atomic::AtomicU64, page: u64, pass: u64, first_pages: u64) {
    let first = if page < first_pages { 1 } else { (page - first_pages) / 8 + 1 };
    let before = word.load(Ordering::Relaxed);
    let expected = if pass == first { 0 } else { page * 1_000_000 + pass - first };
    assert_eq!(before, expected, "page {page} in pass {pass}");
    word.store(page * 1_000_000 + pass - first + 1, Ordering::Relaxed);
}

#[test]
fn an_engine_that_dies_leaves_an_unwatched_region_as_it_is() {
    let lender = OurLender::start(EXTENTS);
    let served = auto();
    served.fill(0..USED, 1);
    served.kill_engine();
    served.has(0..USED, 1);
    served.fill(USED..2 * USED, 1);
    wait_until("the program is attached again", || served.status().programs.len() == 1);
    assert_eq!(served.faults(), 0);
    served.add(lender.lease(1)).unwrap();
    served.resize(CACHE).unwrap();
    served.has(0..2 * USED, 1);
}

/// Returns how much of a mapping of this process is in huge pages.
fn in_huge_pages(region: &Region) -> Bytes {
    let address = format!("{:x}-", region.bytes().as_ptr().addr());
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mapping = maps.lines().skip_while(|line| !line.starts_with(&address));
    let kib = mapping.map_while(|line| {
        let kib = line.strip_prefix("ShmemPmdMapped:").map(|rest| rest.trim_end_matches("kB"));
        (!line.starts_with("VmFlags")).then(|| kib.and_then(|kib| kib.trim().parse().ok()))
    });
    Bytes::kib(kib.flatten().next().unwrap())
}

/// The test works on a kernel without huge pages, too. There it tests less.
#[test]
fn huge_pages_are_split_before_the_first_page_leaves() {
    let lender = OurLender::start(EXTENTS);
    let served = auto();
    let region = served.region.as_ref().unwrap();
    served.fill(0..PAGES, 1);
    assert_eq!(in_huge_pages(region) > Bytes::ZERO, has_huge_pages());
    // A hole in a huge page, which the kernel splits into folios of many sizes.
    region.discard(700..701).unwrap();
    served.add(lender.lease(1)).unwrap();
    served.resize(CACHE).unwrap();
    assert_eq!(in_huge_pages(region), Bytes::ZERO);
    assert_eq!(served.word(700, 7).swap(701, Ordering::Relaxed), 0);
    served.has(0..PAGES, 1);
    served.fill(0..PAGES, 2);
    served.kill_engine();
    served.has(0..PAGES, 2);
    let usage = served.status().usage;
    assert!(usage.remote >= usage.size.saturating_sub(CACHE), "{usage:?}");
}
