//! Faults that wait at the same time.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use aquifer_page::PAGE_SIZE;
use aquifer_region::{PolicyKind, Scheme};

use crate::common::Setting;
use crate::common::pool::wait_until;

const PAGES: u64 = 1024;

/// Returns whether a thread of this process waits for a page.
fn waits(thread: i32) -> bool {
    let place = fs::read_to_string(format!("/proc/self/task/{thread}/wchan")).unwrap();
    place.contains("userfault")
}

#[test]
fn one_worker_fetches_the_pages_of_many_threads_together() {
    let mut setting = Setting::new(PAGES);
    (setting.latency, setting.workers) = (Some(Duration::from_millis(1)), 1);
    let serving = setting.serve(64, PolicyKind::Fifo, Scheme::OnDemand);
    let region = setting.map();
    let word = |page: u64| &region.words()[page as usize * PAGE_SIZE / 8];
    (0..PAGES).for_each(|page| word(page).store(page + 1, Ordering::Relaxed));
    // The cache must have room for all pages of a fetch.
    serving.engine.resize_cache(aquifer_page::Bytes(128 * PAGE_SIZE as u64)).unwrap();
    let fetches = || serving.engine.link_times().unwrap().count();
    let before = fetches();
    setting.lender.freeze();
    // Far from each other, so that none is fetched with another one.
    let pages = [300, 0, 100, 200, 400, 500];
    let found = AtomicU64::new(0);
    thread::scope(|scope| {
        for (number, page) in pages.into_iter().enumerate() {
            let (sender, id) = mpsc::channel();
            let (found, word) = (&found, &word);
            scope.spawn(move || {
                sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                assert_eq!(word(page).load(Ordering::Relaxed), page + 1);
                found.fetch_add(1, Ordering::Relaxed);
            });
            let thread = id.recv().unwrap();
            if number == 0 {
                // The only worker waits for the lender; the other faults wait for the worker.
                wait_until("the first page is on its way", || serving.engine.waiting()[1] == 1);
            } else {
                wait_until("the thread waits for its page", || waits(thread));
            }
        }
        assert_eq!((found.load(Ordering::Relaxed), fetches()), (0, before));
        setting.lender.thaw();
    });
    assert_eq!(found.load(Ordering::Relaxed), 6);
    assert_eq!(fetches() - before, 2, "one fetch of one page, and one of five");
    wait_until("all are counted", || serving.engine.counts().remote_faults == 6);
}
