//! Pages that are equal to frames of the group: shared, written, evicted and discarded while
//! programs use them.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_page::{Bytes, FrameIndex, PAGE_SIZE, PageIndex};
use aquifer_region::{Merged, PolicyKind, Proposal, Scheme};
use aquifer_region_client::Region;

use crate::common::{PAGE, Serving, Setting};

const WORDS: usize = PAGE_SIZE / 8;

/// Returns the word at this index of a frame.
fn of_frame(frame: u64, word: usize) -> u64 {
    (frame + 1) * 1_000_003 + word as u64
}

fn frames(setting: &Setting, count: u64) {
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create(true).truncate(false).open(setting.frames()).unwrap();
    file.set_len(count * PAGE).unwrap();
    for frame in 0..count {
        let page: Vec<u8> =
            (0..WORDS).flat_map(|word| of_frame(frame, word).to_ne_bytes()).collect();
        file.write_all_at(&page, frame * PAGE).unwrap();
    }
}

fn write(region: &Region, page: u64, content: impl Fn(usize) -> u64) {
    for word in 0..WORDS {
        region.words()[page as usize * WORDS + word].store(content(word), Ordering::Relaxed);
    }
}

#[track_caller]
fn check(region: &Region, page: u64, content: impl Fn(usize) -> u64) {
    for word in 0..WORDS {
        let is = region.words()[page as usize * WORDS + word].load(Ordering::Relaxed);
        assert_eq!(is, content(word), "page {page}, word {word}");
    }
}

fn serve(setting: &Setting, frames: u64) -> Serving {
    setting.serve(frames, PolicyKind::default(), Scheme::PreEvict)
}

fn proposals(
    pages: impl Iterator<Item = u64>,
    frame: impl Fn(u64) -> Option<u64>,
) -> Vec<Proposal> {
    let proposal = |page| Proposal { page: PageIndex(page), frame: frame(page).map(FrameIndex) };
    pages.map(proposal).collect()
}

fn pages(bytes: Bytes) -> u64 {
    bytes.pages()
}

/// Waits until no page is on its way. A program continues a moment before the engine records its
/// page as present.
fn wait_until_in_place(serving: &Serving) {
    serving.engine.persist().unwrap();
}

#[test]
fn equal_pages_are_shared_and_unshared_by_a_write() {
    let setting = Setting::new(256);
    frames(&setting, 64);
    let serving = serve(&setting, 200);
    let region = setting.map();
    (0..64).for_each(|page| write(&region, page, |word| of_frame(page, word)));
    (64..80).for_each(|page| write(&region, page, |_| 0));
    write(&region, 80, |_| 7);
    wait_until_in_place(&serving);
    let blocks = || std::fs::metadata(setting.region()).unwrap().blocks() / 8;
    let before = blocks();
    let equal = |page: u64| (page < 64).then_some(page);
    let wanted =
        proposals(
            (0..80).chain([80, 250, 999]),
            |page| if page == 80 { Some(1) } else { equal(page) },
        );
    let merged = serving.engine.share(&wanted).unwrap();
    assert_eq!(merged, Merged { shared: 64, zero: 16, differ: 1, busy: 2 });
    assert_eq!(before - blocks(), 80);
    assert_eq!(pages(serving.engine.usage().shared), 64);
    // A read does not unshare a page.
    (0..64).for_each(|page| check(&region, page, |word| of_frame(page, word)));
    (64..80).for_each(|page| check(&region, page, |_| 0));
    assert_eq!(serving.engine.counts().cow_breaks, 0);
    // A write affects only this region.
    region.words()[3 * WORDS + 5].store(42, Ordering::Relaxed);
    check(&region, 3, |word| if word == 5 { 42 } else { of_frame(3, word) });
    assert_eq!((serving.engine.counts().cow_breaks, pages(serving.engine.usage().shared)), (1, 63));
    wait_until_in_place(&serving);
    let again = serving.engine.share(&proposals(0..64, Some)).unwrap();
    assert_eq!(again, Merged { shared: 0, zero: 0, differ: 1, busy: 63 });
    region.words()[3 * WORDS + 5].store(of_frame(3, 5), Ordering::Relaxed);
    wait_until_in_place(&serving);
    assert_eq!(serving.engine.share(&proposals(3..4, Some)).unwrap().shared, 1);
    // A discarded page is no longer shared.
    region.discard(0..8).unwrap();
    (0..8).for_each(|page| check(&region, page, |_| 0));
    (8..64).for_each(|page| check(&region, page, |word| of_frame(page, word)));
    assert_eq!(pages(serving.engine.usage().shared), 56);
}

#[test]
fn shared_pages_reach_lenders_and_outlive_the_program() {
    let setting = Setting::new(256);
    frames(&setting, 32);
    let serving = serve(&setting, 200);
    let region = setting.map();
    (0..48).for_each(|page| write(&region, page, |word| of_frame(page % 32, word)));
    // A page may still be on its way after its program has continued.
    let mut shared = 0;
    while shared < 48 {
        shared += serving.engine.share(&proposals(0..48, |page| Some(page % 32))).unwrap().shared;
    }
    serving.engine.persist().unwrap();
    assert_eq!(pages(serving.engine.usage().shared), 48);
    (0..48).for_each(|page| check(&region, page, |word| of_frame(page % 32, word)));
    region.words()[40 * WORDS].store(1, Ordering::Relaxed);
    check(&region, 40, |word| if word == 0 { 1 } else { of_frame(8, word) });
    // Another program sees the same content, and the first sees its writes.
    drop(region);
    crate::common::pool::wait_until("the engine knows", || serving.engine.mapped_by().is_empty());
    assert_eq!(pages(serving.engine.usage().shared), 47);
    let region = setting.map();
    check(&region, 40, |word| if word == 0 { 1 } else { of_frame(8, word) });
    (0..40).for_each(|page| check(&region, page, |word| of_frame(page % 32, word)));
    let another = setting.map();
    another.words()[2 * WORDS].store(2, Ordering::Relaxed);
    check(&region, 2, |word| if word == 0 { 2 } else { of_frame(2, word) });
    assert_eq!(
        serving.engine.share(&proposals(3..4, Some)).unwrap(),
        Merged { busy: 1, ..Merged::default() }
    );
}

#[test]
fn a_region_in_a_hand_over_shares_nothing() {
    let setting = Setting::new(64);
    frames(&setting, 32);
    let serving = serve(&setting, 128);
    let region = setting.map();
    (0..32).for_each(|page| write(&region, page, |word| of_frame(page, word)));
    wait_until_in_place(&serving);
    assert_eq!(serving.engine.share(&proposals(0..32, Some)).unwrap().shared, 32);
    serving.engine.begin_outgoing().unwrap();
    assert_eq!(pages(serving.engine.usage().shared), 0);
    assert_eq!(serving.engine.share(&proposals(0..32, Some)).unwrap().busy, 32);
    region.words()[0].store(9, Ordering::Relaxed);
    check(&region, 0, |word| if word == 0 { 9 } else { of_frame(0, word) });
    (1..32).for_each(|page| check(&region, page, |word| of_frame(page, word)));
    // The hand-over is aborted.
    serving.engine.own();
    wait_until_in_place(&serving);
    assert_eq!(
        serving.engine.share(&proposals(0..32, Some)).unwrap(),
        Merged { shared: 31, differ: 1, ..Merged::default() }
    );
    (1..32).for_each(|page| check(&region, page, |word| of_frame(page, word)));
}

#[test]
fn a_small_cache_evicts_while_pages_are_written_and_shared() {
    const PAGES: u64 = 512;
    const FRAMES: u64 = 16;
    const THREADS: u64 = 4;
    let rounds = std::env::var("AQUIFER_ROUNDS").map_or(40, |rounds| rounds.parse().unwrap());
    let setting = Setting::new(PAGES);
    frames(&setting, FRAMES);
    let serving = serve(&setting, 160);
    let region = setting.map();
    let done = AtomicBool::new(false);
    let (merged, written) = thread::scope(|scope| {
        let sharing = scope.spawn(|| {
            let mut all = Merged::default();
            let mut first = 0;
            while !done.load(Ordering::Relaxed) {
                let some = (first..first + 64).map(|page| page % PAGES);
                let merged =
                    serving.engine.share(&proposals(some, |page| Some(page % FRAMES))).unwrap();
                all.shared += merged.shared;
                all.differ += merged.differ;
                let some = (first..first + 16).map(|page| page % PAGES);
                all.zero += serving.engine.share(&proposals(some, |_| None)).unwrap().zero;
                first = (first + 64) % PAGES;
            }
            all
        });
        let writers = (0..THREADS).map(|thread| {
            let region = &region;
            scope.spawn(move || {
                let mut versions = vec![0_u64; PAGES as usize];
                let own = || (thread..PAGES).step_by(THREADS as usize);
                // Returns a page's word in a version: zero, the frame's, the frame's with one
                // changed word, or unique.
                let content = |page: u64, version: u64, word: usize| match version % 4 {
                    0 => 0,
                    1 => of_frame(page % FRAMES, word),
                    2 if word == 99 => version,
                    2 => of_frame(page % FRAMES, word),
                    _ => version << 32 | page << 12 | word as u64,
                };
                let mut written = 0_u64;
                for round in 0..rounds {
                    for page in own().filter(|page| !(page / THREADS + round).is_multiple_of(3)) {
                        let version = versions[page as usize];
                        check(region, page, |word| content(page, version, word));
                        versions[page as usize] += 1 + (page + round) % 2;
                        let version = versions[page as usize];
                        write(region, page, |word| content(page, version, word));
                        written += 1;
                    }
                }
                own().for_each(|page| {
                    check(region, page, |word| content(page, versions[page as usize], word))
                });
                written
            })
        });
        let writers: Vec<_> = writers.collect();
        let written: u64 = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
        done.store(true, Ordering::Relaxed);
        (sharing.join().unwrap(), written)
    });
    let counts = serving.engine.counts();
    assert!(written > 0 && merged.shared > 0 && counts.cow_breaks > 0, "{merged:?} {counts:?}");
    assert_eq!(counts.merged, merged.shared);
    let is = pages(serving.engine.usage().shared);
    let least = counts.merged.saturating_sub(counts.cow_breaks);
    assert!(is <= PAGES && is >= least, "{is}: {counts:?}");
}
