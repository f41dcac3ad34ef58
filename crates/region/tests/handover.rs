//! A region goes from one engine to another while it is written to, and none of it is lost.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use aquifer_mapping::{Region, Run};
use aquifer_page::PAGE_SIZE;
use aquifer_region::handover::{Frame, Round, Sent};
use aquifer_region::{Engine, Incoming, PolicyKind, Scheme};
use common::Setting;

const PAGES: u64 = 4096;
const FRAMES: u64 = 1024;
const WORDS: usize = PAGE_SIZE / 8;

/// The whole page holds its version.
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

/// Frames as they travel.
fn round(from: &Engine, to: &Engine, incoming: &mut Incoming, round: Round) -> Sent {
    let mut wire = Vec::new();
    let sent = from.round(round, &mut |frame, data| frame.send(&mut wire, data)).unwrap();
    let (mut wire, mut data) = (wire.as_slice(), Vec::new());
    while let Some(frame) = Frame::receive(&mut wire, &mut data).unwrap() {
        to.take_in(incoming, &frame, &data).unwrap();
    }
    sent
}

/// Writes to pages, some of them more often than others, reads others, and discards a few, until told to stop.
fn work(region: &Region, versions: &[AtomicU64], seed: u64, stop: &AtomicBool) {
    let mut random = seed | 1;
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let page = if random & 7 == 0 { random >> 16 } else { (random >> 16) % (PAGES / 16) } % PAGES;
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

fn goes_to_and_fro(rounds: &[Round]) {
    let mut here = Setting::new(PAGES);
    let mut serving = here.serve(FRAMES, PolicyKind::Clock, Scheme::PreEvict);
    let versions: Vec<_> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    for journey in 0..6 {
        let there = Setting::with(here.lender.clone(), PAGES);
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
        let last = round(from, to, &mut incoming, Round::Last);
        eprintln!("last: {last:?}");
        // A device is saved, which writes to memory.
        write(&region, 7, 1 << 40);
        versions[7].store(1 << 40, Ordering::Relaxed);
        round(from, to, &mut incoming, Round::Rest);
        to.own();
        // The one before must not write to the volume any more.
        drop(region);
        drop(serving);
        let region = there.map();
        (0..PAGES).for_each(|page| check(&region, page, versions[page as usize].load(Ordering::Relaxed)));
        drop(region);
        common::pool::wait_until("the engine knows", || next.engine.mapped_by().is_empty());
        (here, serving) = (there, next);
    }
}

#[test]
fn what_is_here_and_dirty_is_sent_while_a_program_goes_on() {
    goes_to_and_fro(&[Round::Copy, Round::Copy, Round::Copy]);
}

#[test]
fn what_is_dirty_goes_to_the_pool_while_a_program_goes_on() {
    goes_to_and_fro(&[Round::Clean, Round::Clean]);
}

#[test]
fn what_stands_still_goes_at_once() {
    goes_to_and_fro(&[]);
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
    // More than there is room for can be touched meanwhile, but nothing leaves or changes.
    let written = serving.engine.counts().written_back;
    (0..PAGES).for_each(|page| check(&region, page, 1));
    assert_eq!(serving.engine.counts().written_back, written);
    assert!(serving.engine.discard(Run { first: 0, count: 1 }).is_err());
    assert!(serving.engine.persist().is_err());
    serving.engine.own();
    (0..PAGES).for_each(|page| write(&region, page, 2));
    (0..PAGES).for_each(|page| check(&region, page, 2));
    assert!(serving.engine.usage().resident.pages() <= FRAMES + 64);
}
