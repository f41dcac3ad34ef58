//! A lease joins, and a lease is evacuated, while the region's program runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_page::{Bytes, LeaseId};
use aquifer_region::process::client;
use aquifer_volume::{LeaseState, LeaseTarget};

use super::{CACHE, EXTENTS, SIZE, Served, cannot_run, kill, lenders, pages};
use crate::common::pool::{OurLender, wait_until};

/// Writes and checks pages in turn until `stop`. Returns the last version of all pages.
fn use_pages(served: &Served, stop: &AtomicBool) -> u64 {
    let mut version = 1;
    while !stop.load(Ordering::Relaxed) {
        for page in pages() {
            served.check(page, version);
            served.write(page, version + 1);
        }
        version += 1;
    }
    version
}

/// Evacuates lease 1 while a program uses the pages. Returns the last version of all pages.
fn evacuate_in_use(served: &Served) -> u64 {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let program = scope.spawn(|| use_pages(served, &stop));
        let mut seen = Vec::new();
        let moved = client::evacuate(&served.files, LeaseId(1), None, |now| seen.push(now));
        stop.store(true, Ordering::Relaxed);
        moved.unwrap();
        assert_eq!(seen.last().map(|now| (now.moved, now.total)), Some((EXTENTS, EXTENTS)));
        program.join().unwrap()
    })
}

/// Returns a region whose pages are all on its first lease. It has an empty one, too.
fn filled() -> ([OurLender; 2], Served) {
    let [one, two] = lenders();
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    served.add(two.lease(2)).unwrap();
    ([one, two], served)
}

#[test]
fn pages_move_to_a_new_lease_while_a_program_uses_them() {
    if cannot_run() {
        return;
    }
    let ([one, _two], served) = filled();
    let version = evacuate_in_use(&served);
    served.check_all(version);
    assert_eq!(served.leases(), [2]);
    assert_eq!(one.ram(), Bytes::ZERO, "the lender has its memory back");
    // It needs the first lender no more, nor does the next engine.
    drop(one);
    served.kill_engine();
    served.check_all(version);
    assert!(matches!(served.status().volume.leases[..], [ref lease] if lease.lease == LeaseId(2)));
}

#[test]
fn killed_engines_and_supervisors_keep_the_present_leases() {
    if cannot_run() {
        return;
    }
    let (_lenders, served) = filled();
    served.kill_engine();
    assert_eq!(served.leases(), [1, 2]);
    served.evacuate(1).unwrap();
    served.kill_all();
    served.check_all(1);
    assert_eq!(served.leases(), [2]);
    assert_eq!(served.status().spec.leases.len(), 1);
}

#[test]
fn an_evacuation_whose_engines_are_killed_loses_nothing() {
    if cannot_run() {
        return;
    }
    let [one, two] = lenders();
    let served = Served::new(&[one.lease(1), two.lease(2)]);
    let mut version = 0;
    for (from, to) in [(1, 2), (2, 1), (1, 2)] {
        version += 1;
        served.write_all(version);
        let mut killed = 0;
        let moved = client::evacuate(&served.files, LeaseId(from), None, |_| {
            // An engine that was just killed, or just started, may not answer.
            if killed < 2
                && let Ok(status) = client::status(&served.files)
            {
                killed += 1;
                kill(status.pid);
            }
        });
        // The client repeats the request to the next engine, for which an operator may have to
        // wait longer than the client does.
        wait_until("the lease is evacuated", || moved.is_ok() || served.evacuate(from).is_ok());
        assert!(killed > 0);
        served.check_all(version);
        assert_eq!(served.leases(), [to]);
        let lender = if from == 1 { &one } else { &two };
        assert_eq!(lender.ram(), Bytes::ZERO, "the lender has its memory back");
        served.add(lender.lease(from)).unwrap();
    }
}

#[test]
fn a_lender_that_dies_during_an_evacuation_is_named() {
    if cannot_run() {
        return;
    }
    let ([mut one, _two], served) = filled();
    one.kill();
    let refused = served.evacuate(1).unwrap_err();
    assert!(refused.contains("lender lender-1") && refused.contains("unreachable"), "{refused}");
    assert_eq!(served.leases(), [1, 2]);
    one.restart();
    wait_until("the lease is evacuated", || served.evacuate(1).is_ok());
    served.check_all(1);
    assert_eq!(served.leases(), [2]);
}

#[test]
fn a_destination_that_dies_costs_nothing() {
    if cannot_run() {
        return;
    }
    let ([_one, mut two], served) = filled();
    two.kill();
    let refused = served.evacuate(1).unwrap_err();
    assert!(refused.contains("lender lender-2"), "{refused}");
    served.check_all(1);
    served.write_all(2);
    assert_eq!(served.leases(), [1, 2]);
    two.restart();
    wait_until("the lease is evacuated", || served.evacuate(1).is_ok());
    served.check_all(2);
}

#[test]
fn without_room_elsewhere_an_evacuation_changes_nothing() {
    if cannot_run() {
        return;
    }
    let [one] = lenders();
    let small = OurLender::start(1);
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    for (more, leases) in [(None, &[1][..]), (Some(small.lease(2)), &[1, 2])] {
        more.into_iter().for_each(|lease| served.add(lease).unwrap());
        let refused = served.evacuate(1).unwrap_err();
        assert!(refused.contains("no lease has room"), "{refused}");
        assert_eq!(served.leases(), leases);
        assert_eq!(served.status().volume.leases[0].state, LeaseState::Ok);
        served.check_all(1);
    }
}

#[test]
fn pages_come_home_from_the_last_lease_and_leave_again() {
    if cannot_run() {
        return;
    }
    let [one, two] = lenders();
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    let resize = |cache| client::resize_cache(&served.files, cache, client::By::Operator);
    resize(SIZE).unwrap();
    let version = evacuate_in_use(&served);
    assert_eq!((served.leases(), one.ram()), (vec![], Bytes::ZERO));
    drop(one);
    // No page may leave, also not to a file of this host, until there is another lender.
    for _ in 0..2 {
        let refused = resize(CACHE).unwrap_err().to_string();
        assert!(refused.contains("too little memory at lenders"), "{refused}");
        served.check_all(version);
        let status = served.status();
        assert_eq!((status.usage.cache, status.usage.remote), (SIZE, Bytes::ZERO));
        served.kill_engine();
    }
    served.add(two.lease(2)).unwrap();
    resize(CACHE).unwrap();
    assert!(two.ram() > Bytes::ZERO);
    served.check_all(version);
}

#[test]
fn a_region_keeps_its_last_lease_even_if_that_is_empty() {
    if cannot_run() {
        return;
    }
    let [one] = lenders();
    let served = Served::new(&[one.lease(1)]);
    let refused = served.evacuate(1).unwrap_err();
    assert!(refused.contains("no lease has room"), "{refused}");
    assert_eq!(served.leases(), [1]);
    served.kill_engine();
    served.write_all(1);
    served.kill_engine();
    served.check_all(1);
}

#[test]
fn repeated_requests_are_done_and_contradictory_ones_refused() {
    if cannot_run() {
        return;
    }
    let [one, two] = lenders();
    let served = Served::new(&[one.lease(1)]);
    for _ in 0..2 {
        served.add(two.lease(2)).unwrap();
    }
    assert_eq!(served.leases(), [1, 2]);
    // The next engine knows of the request, too.
    served.kill_engine();
    served.add(two.lease(2)).unwrap();
    assert_eq!(served.leases(), [1, 2]);

    let twice = LeaseTarget { lease: LeaseId(3), ..two.lease(2) };
    let refused = served.add(twice).unwrap_err();
    assert!(refused.contains(&LeaseId(2).to_string()), "{refused}");
    let elsewhere = LeaseTarget { address: "unix:/nowhere".parse().unwrap(), ..two.lease(2) };
    let refused = served.add(elsewhere.clone()).unwrap_err();
    assert!(refused.contains("has lease") && refused.contains("already"), "{refused}");
    let absent = LeaseTarget { lease: LeaseId(3), ..elsewhere };
    let refused = served.add(absent).unwrap_err();
    assert!(refused.contains("lender-2"), "{refused}");
    assert_eq!(served.leases(), [1, 2]);
    for _ in 0..2 {
        served.evacuate(2).unwrap();
    }
    served.evacuate(77).unwrap();
    assert_eq!(served.leases(), [1]);
}
