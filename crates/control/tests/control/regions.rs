//! Tests of a lender's leases for regions: the ledger limits them, and roles do not.

use aquifer_control::{Event, LoanState, Message, Owner, Reason, Role};
use aquifer_page::{Bytes, LeaseId};

use crate::host::{Host, TOTAL, ack, bor_fin, config, len_fin, name, region_req, req};

/// Lends 1 GiB to the region `items` of `c`, and returns the lease.
fn lend(host: &mut Host, request: u128) -> LeaseId {
    let opened = host.receive("c", region_req(request, Bytes::gib(1))).opened();
    assert_eq!(opened.owner, Owner::Region("items".parse().unwrap()));
    let (lease, uris) = (opened.lease, vec!["here".to_owned()]);
    host.event(Event::LeaseOpened { lease, uris });
    lease
}

#[test]
fn a_lease_for_a_region_makes_no_lender() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    lend(&mut host, 1);
    assert_eq!(host.role(), Role::Neutral);
    let lease = host.lend("b", 2, Bytes::gib(1));
    assert_eq!(host.role(), Role::Lender);
    host.receive("b", bor_fin(lease)).event(Event::LeaseFreed { lease });
    assert_eq!((host.role(), host.controller.lent().len()), (Role::Neutral, 1));
}

#[test]
fn a_borrower_lends_to_regions_and_not_to_swap() {
    let mut host = Host::new(config());
    host.borrow();
    host.tick(70, &[]);
    host.receive("c", req(9, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Borrowing));
    lend(&mut host, 10);
    assert_eq!(host.role(), Role::Borrower);
    // It lends no memory that its own swapped pages need.
    host.read(70, Bytes::gib(1), &[]).receive("c", region_req(11, Bytes::mib(64)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::NoRoom));
}

#[test]
fn a_lender_borrows_for_its_regions() {
    let mut host = Host::new(config());
    host.tick(20, &[("b", 4)]);
    host.lend("c", 1, Bytes::gib(1));
    host.event(Event::BorrowFor(crate::host::for_region(5, Bytes::gib(1))));
    let (to, request, bytes) = host.request_sent();
    assert_eq!((to.as_str(), bytes), ("b", Bytes::gib(1)));
    let spare = host.controller.spare();
    assert!(spare > Bytes::ZERO, "it lends to swap meanwhile");
    let volume = host.receive("b", ack(request, 7, bytes)).activates().volume;
    host.event(Event::Activated { volume });
    assert_eq!((host.role(), host.controller.spare()), (Role::Lender, spare));
}

#[test]
fn an_overloaded_host_recalls_leases_of_regions_in_any_role() {
    for borrows in [false, true] {
        let mut host = Host::new(config());
        if borrows {
            host.borrow();
        }
        host.tick(65, &[]);
        let lease = lend(&mut host, 3);
        host.stored.insert(lease, Bytes::gib(1));
        host.tick(85, &[]);
        assert!(host.sent().contains(&("c", &len_fin(lease.0))), "{:?}", host.step);
        host.receive("c", region_req(4, Bytes::gib(1)));
        assert_eq!(host.rejection_sent().1, Reason::Recalling);
    }
}

#[test]
fn a_drain_recalls_leases_of_regions_also_late_ones() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let held = lend(&mut host, 1);
    let late = host.receive("c", region_req(2, Bytes::gib(1))).opened().lease;
    host.event(Event::Drain { on: true });
    assert_eq!(host.sent(), [("c", &len_fin(held.0))]);
    host.event(Event::LeaseOpened { lease: late, uris: Vec::new() });
    host.tick(20, &[]);
    assert!(
        host.sent().contains(&("c", &Message::MemLenFin { lease: late, generation: 0 })),
        "{:?}",
        host.step
    );
    host.receive("c", region_req(3, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Draining));
}

#[test]
fn a_region_gets_no_more_than_the_thresholds_leave() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let spare = host.controller.spare_for_regions();
    assert_eq!(spare, TOTAL.scaled(0.8) - TOTAL.scaled(0.2));
    host.receive("c", region_req(1, spare + Bytes::mib(64)));
    assert_eq!(host.rejection_sent(), (spare, Reason::NoRoom));
}

#[test]
fn a_restored_lease_of_a_region_makes_no_lender() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let lent = host.receive("c", region_req(1, Bytes::gib(1))).opened();
    let found = aquifer_control::Restored {
        lent: vec![(lent, vec!["here".to_owned()])],
        ..Default::default()
    };
    let name = name("me");
    let controller = aquifer_control::Controller::restore(name, config(), 9, host.now, found);
    assert_eq!((controller.role(), controller.lent().len()), (Role::Neutral, 1));
}

/// Lets `c` permit `d` to use the lease of its region. Then passes the grace twice, while only `d`
/// answers; `denies` says how. Returns whether the lease is still lent.
fn is_kept_by_the_next_host(left: bool, denies: bool) -> bool {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let lease = lend(&mut host, 1);
    host.event(Event::Permit { from: name("c"), lease, generation: 0, to: name("d") });
    let lent = host.controller.lent()[0].lease.clone();
    host.event(Event::LeaseRecorded(lent));
    if left {
        host.receive("c", bor_fin(lease));
    }
    let ends = host.now + config().grace * 2;
    let mut questions = 0;
    while host.now < ends {
        host.now += config().resend;
        host.tick(20, &[]);
        let asked = host.sent().into_iter().find(|(to, _)| *to == "d");
        let Some(question) = asked.map(|(_, question)| question.clone()) else { continue };
        questions += 1;
        let denial = Message::MemBorFin { lease, generation: 1 };
        // The denial may come before the answer to the call, and after it.
        if denies && questions % 2 == 0 {
            host.receive("d", denial.clone());
        }
        host.event(Event::Delivered { to: name("d"), message: question });
        if denies && questions % 2 == 1 {
            host.receive("d", denial);
        }
    }
    assert!(questions > 0, "it asks the next host");
    host.controller.lent().iter().any(|lent| lent.state != LoanState::Freeing)
}

#[test]
fn a_lease_stays_while_the_next_host_waits_for_its_operator() {
    for left in [false, true] {
        assert!(is_kept_by_the_next_host(left, false), "left: {left}");
        assert!(!is_kept_by_the_next_host(left, true), "left: {left}");
    }
}
