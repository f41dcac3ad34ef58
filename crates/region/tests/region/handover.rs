//! A region moves between engines while a program writes to it, and no write is lost.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use aquifer_page::{ExtentIndex, LeaseId, PAGE_SIZE, PAGES_PER_EXTENT};
use aquifer_region::handover::{Extent, Frame, Round, Sent};
use aquifer_region::{Engine, Incoming, PolicyKind, Scheme};
use aquifer_region_client::{Region, Run};

use crate::common::Setting;

const PAGES: u64 = 4096;
const FRAMES: u64 = 1024;
const WORDS: usize = PAGE_SIZE / 8;

/// Fills the whole page with its version.
fn write(region: &Region, page: u64, version: u64) {
    let words = &region.words()[page as usize * WORDS..][..WORDS];
    words.iter().for_each(|is| is.store(version << 16 | page, Ordering::Relaxed));
}

fn check(region: &Region, page: u64, version: u64) {
    let should = if version == 0 { 0 } else { version << 16 | page };
    for is in &region.words()[page as usize * WORDS..][..WORDS] {
        assert_eq!(is.load(Ordering::Relaxed), should, "page {page}, version {version}");
    }
}

/// Does a round, with its frames in their wire format.
fn round(from: &Engine, to: &Engine, incoming: &mut Incoming, round: Round) -> Sent {
    let mut wire = Vec::new();
    let sent = from.round(round, &mut |frame, data| frame.send(&mut wire, data)).unwrap();
    let (mut wire, mut data) = (wire.as_slice(), Vec::new());
    while let Some(frame) = Frame::receive(&mut wire, &mut data).unwrap() {
        to.take_in(incoming, &frame, &data).unwrap();
    }
    sent
}

/// Writes to pages, some more often than others, reads others and discards a few, until stopped.
fn work(region: &Region, versions: &[AtomicU64], seed: u64, stop: &AtomicBool) {
    let mut random = seed | 1;
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let page =
            if random & 7 == 0 { random >> 16 } else { (random >> 16) % (PAGES / 16) } % PAGES;
        let version = versions[page as usize].load(Ordering::Relaxed);
        match random >> 8 & 15 {
            0 => {
                region.discard(page..page + 1).unwrap();
                versions[page as usize].store(0, Ordering::Relaxed);
            }
            1..=8 => {
                write(region, page, version + 1);
                versions[page as usize].store(version + 1, Ordering::Relaxed);
            }
            _ => check(region, page, version),
        }
    }
}

/// Makes `to` fetch the next pages that were left behind at `from`. Returns their number, 0 if it
/// has all.
fn fetch_postcopy(from: &Engine, to: &Engine, cursor: &mut u64) -> u64 {
    let wanted = to.next_postcopy(Some(cursor)).unwrap();
    // Taken in twice, as after a broken connection.
    let mut take = |frame: &Frame, data: &[u8]| {
        to.take_in(&mut Incoming::default(), frame, data).unwrap();
        to.take_in(&mut Incoming::default(), frame, data).unwrap();
        Ok(())
    };
    if !wanted.is_empty() {
        from.send_postcopy(&wanted, &mut take).unwrap();
    }
    wanted.iter().map(|run| run.count).sum()
}

fn goes_to_and_fro(rounds: &[Round], last: Round) {
    let mut here = Setting::new(PAGES);
    let mut serving = here.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let versions: Vec<_> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    for journey in 0..6 {
        let there = here.there();
        let next = there.serve_as(FRAMES, PolicyKind::Clock, Scheme::PreEvict, true);
        let (region, stop) = (here.map(), AtomicBool::new(false));
        let (from, to) = (&serving.engine, &next.engine);
        let mut incoming = Incoming::default();
        from.begin_outgoing().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| work(&region, &versions, journey * 77 + 5, &stop));
            for kind in rounds {
                thread::sleep(std::time::Duration::from_millis(60));
                let sent = round(from, to, &mut incoming, *kind);
                eprintln!("{kind:?}: {sent:?}");
                assert!(to.usage().resident.pages() <= FRAMES + 64, "{:?}", to.usage());
            }
            stop.store(true, Ordering::Relaxed);
        });
        let last = round(from, to, &mut incoming, last);
        eprintln!("last: {last:?}");
        // QEMU saves a device, which writes to memory.
        write(&region, 7, 1 << 40);
        versions[7].store(1 << 40, Ordering::Relaxed);
        round(from, to, &mut incoming, Round::Rest);
        if last.left_at_source > 0 {
            // The page written since may have been one of them.
            let (awaiting, left) = (to.usage().awaiting_source.pages(), last.left_at_source);
            assert!(awaiting == left || awaiting + 1 == left, "{awaiting} of {left} are left");
            let beyond = [Run { first: PAGES, count: 1 }];
            assert!(from.send_postcopy(&beyond, &mut |_, _| Ok(())).is_err());
        }
        to.own();
        // The source must not write to the volume any more.
        drop(region);
        let region = there.map();
        if last.left_at_source > 0 {
            assert!(to.begin_outgoing().is_err(), "it is not all there");
            let (stop, mut cursor) = (AtomicBool::new(false), 0);
            // The first come before the program runs, which may write anew to any of the others.
            let awaits = to.usage().awaiting_source.pages() > 0;
            assert_eq!(fetch_postcopy(from, to, &mut cursor) > 0, awaits);
            let fetched = thread::scope(|scope| {
                scope.spawn(|| work(&region, &versions, journey * 99 + 1, &stop));
                let fetching = scope.spawn(|| while fetch_postcopy(from, to, &mut cursor) > 0 {});
                let fetched = fetching.join();
                stop.store(true, Ordering::Relaxed);
                fetched
            });
            fetched.unwrap();
            assert_eq!(to.usage().awaiting_source.pages(), 0);
        }
        drop(serving);
        (0..PAGES)
            .for_each(|page| check(&region, page, versions[page as usize].load(Ordering::Relaxed)));
        drop(region);
        crate::common::pool::wait_until("the engine knows", || next.engine.mapped_by().is_empty());
        (here, serving) = (there, next);
    }
}

#[test]
fn resident_dirty_pages_are_sent_while_a_program_runs() {
    goes_to_and_fro(&[Round::Copy, Round::Copy, Round::Copy], Round::Last);
}

#[test]
fn dirty_pages_are_written_back_while_a_program_runs() {
    goes_to_and_fro(&[Round::Clean, Round::Clean], Round::Last);
}

#[test]
fn a_region_at_rest_is_handed_over_at_once() {
    goes_to_and_fro(&[], Round::Last);
}

#[test]
fn pages_left_at_the_source_arrive_by_postcopy() {
    goes_to_and_fro(&[], Round::Leave);
}

#[test]
fn pages_sent_and_rewritten_are_left_at_the_source() {
    goes_to_and_fro(&[Round::Copy, Round::Copy], Round::Leave);
}

#[test]
fn a_region_that_was_not_given_away_goes_on() {
    let setting = Setting::new(PAGES);
    let serving = setting.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    (0..PAGES).for_each(|page| write(&region, page, 1));
    serving.engine.begin_outgoing().unwrap();
    assert!(serving.engine.begin_outgoing().is_err());
    serving.engine.round(Round::Last, &mut |_, _| Ok(())).unwrap();
    // More pages than the cache holds can be touched meanwhile, but none leaves or changes.
    let written = serving.engine.counts().written_back;
    (0..PAGES).for_each(|page| check(&region, page, 1));
    assert_eq!(serving.engine.counts().written_back, written);
    assert!(serving.engine.discard(Run { first: 0, count: 1 }).is_err());
    assert!(serving.engine.persist().is_err());
    serving.engine.own();
    (0..PAGES).for_each(|page| write(&region, page, 2));
    (0..PAGES).for_each(|page| check(&region, page, 2));
    // What came beyond the limit leaves beside the program.
    crate::common::pool::wait_until("the cache is within its limit", || {
        serving.engine.usage().resident.pages() <= FRAMES + 64
    });
}

#[test]
fn an_extent_that_a_region_cannot_have_is_refused() {
    let here = Setting::new(PAGES);
    let serving = here.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let next = here.there().serve_as(FRAMES, PolicyKind::Clock, Scheme::PreEvict, true);
    let mut incoming = Incoming::default();
    serving.engine.begin_outgoing().unwrap();
    round(&serving.engine, &next.engine, &mut incoming, Round::Last);
    for extent in [1, u64::MAX / PAGES_PER_EXTENT + 1, u64::MAX].map(ExtentIndex) {
        let frame = Frame::Extents(vec![Extent { extent, lease: LeaseId(1), slot: 0 }]);
        next.engine.take_in(&mut incoming, &frame, &[]).unwrap_err();
    }
}
