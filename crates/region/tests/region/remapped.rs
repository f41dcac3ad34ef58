//! A new mapping at the address of a mapping that is gone.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_page::PAGE_SIZE;
use aquifer_region::{PolicyKind, Scheme};

use crate::common::Setting;

const PAGES: u64 = 2048;
const WORDS: usize = PAGE_SIZE / 8;

/// A page in flight while its region is unmapped must not enter the region that is mapped there
/// next.
#[test]
fn a_fetch_that_comes_late_is_not_put_into_another_region() {
    let mut setting = Setting::new(PAGES);
    setting.latency = Some(Duration::from_millis(50));
    let serving = setting.serve(256, PolicyKind::default(), Scheme::default());
    let other = Setting::new(PAGES);
    let _serving_other = other.serve(256, PolicyKind::default(), Scheme::default());
    let region = setting.map();
    for page in 0..PAGES as usize {
        region.words()[page * WORDS].store(7, Ordering::Relaxed);
    }
    serving.engine.persist().unwrap();
    drop(region);
    let mut same = 0;
    for first in [0, 600, 1200] {
        let region = setting.map();
        // A scan, so that prefetched pages are in flight.
        for page in first..first + 4 {
            assert_eq!(region.words()[page * WORDS].load(Ordering::Relaxed), 7);
        }
        let address = region.words().as_ptr();
        drop(region);
        let next = other.map();
        same += usize::from(next.words().as_ptr() == address);
        let deadline = Instant::now() + Duration::from_secs(20);
        while serving.engine.waiting()[1] > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(300));
        let wrong = (0..PAGES as usize)
            .filter(|page| next.words()[page * WORDS].load(Ordering::Relaxed) != 0);
        assert_eq!(wrong.count(), 0, "pages of the other region");
    }
    let counts = serving.engine.counts();
    assert!(same > 0 && counts.remote_faults >= 12, "{same} {counts:?}: this shows nothing");
}
