//! A volume over lenders of ours: what is acknowledged outlives them, and their RAM is what it should be.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId};
use aquifer_pool::Volume;
use common::*;

#[test]
fn what_was_acknowledged_outlives_the_lender_that_is_killed_and_started_again() {
    let mut lender = OurLender::start(1);
    let volume = Volume::new(config(1)).unwrap();
    volume.add_lease(lease_at(lender.address(), 1, 1)).unwrap();
    let written = [const { AtomicU64::new(0) }; 3];
    thread::scope(|scope| {
        let writers: Vec<_> = written
            .iter()
            .enumerate()
            .map(|(worker, written)| {
                let volume = &volume;
                // Each its own pages, again and again, until the lender was killed three times.
                scope.spawn(move || {
                    for count in 0..6000 {
                        let offset = (count % 500 * 4 + worker as u64) * PAGE;
                        volume.write(worker, offset, &content(offset, count)).unwrap();
                        written.store(count + 1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for kill in 1..4 {
            wait_until("much is written", || written[0].load(Ordering::Relaxed) > kill * 1200);
            lender.kill();
            lender.restart();
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    for (worker, written) in written.iter().enumerate() {
        let written = written.load(Ordering::Relaxed);
        for count in written - 500..written {
            expect(&volume, (count % 500 * 4 + worker as u64) * PAGE, count);
        }
    }
    assert_eq!(volume.status().errors, 0);
}

#[test]
fn a_lender_holds_what_was_written_to_it_and_nothing_after_it_was_evacuated() {
    let (first, second) = (OurLender::start(2), OurLender::start(2));
    let volume = Volume::new(config(2)).unwrap();
    volume.add_lease(lease_at(first.address(), 1, 2)).unwrap();
    assert_eq!(first.ram(), Bytes::ZERO);
    let pages: Vec<_> = (0..3000).map(|number| number * 10 * PAGE).collect();
    for offset in &pages {
        write(&volume, *offset, 1);
    }
    assert_eq!(first.ram(), Bytes(3000 * PAGE));
    assert!(pages.last().unwrap() > &EXTENT_SIZE);

    volume.add_lease(lease_at(second.address(), 2, 2)).unwrap();
    volume.evacuate(LeaseId(1), |_| ()).unwrap();
    assert_eq!((first.ram(), second.ram()), (Bytes::ZERO, Bytes(3000 * PAGE)));
    for offset in &pages {
        expect(&volume, *offset, 1);
    }
    volume.discard(0, 0, EXTENT_SIZE).unwrap();
    assert_eq!(
        second.ram(),
        Bytes(pages.iter().filter(|offset| **offset >= EXTENT_SIZE).count() as u64 * PAGE)
    );
}
