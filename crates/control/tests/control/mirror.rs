//! Tests of a lender's leases for second copies that go first.

use aquifer_control::ledger::{OwnMemory, VmMemory};
use aquifer_control::{Event, LoanState, Message, Reason};
use aquifer_page::{Bytes, LeaseId};

use crate::host::{Host, TOTAL, bor_fin, config, copies_req, region_req, req};

const UPPER: f64 = 0.8;

/// Lends `gib` GiB for second copies of `c`, and returns the lease.
fn lend_copies(host: &mut Host, request: u128, gib: u64) -> LeaseId {
    let opened = host.receive("c", copies_req(request, Bytes::gib(gib))).opened();
    assert!(opened.goes_first);
    let lease = opened.lease;
    host.event(Event::LeaseOpened { lease, uris: vec!["here".to_owned()] });
    lease
}

/// Lends 1 GiB to a region of `d`, and returns the lease.
fn lend(host: &mut Host, request: u128, gib: u64) -> LeaseId {
    let lease = host.receive("d", region_req(request, Bytes::gib(gib))).opened().lease;
    host.event(Event::LeaseOpened { lease, uris: vec!["here".to_owned()] });
    lease
}

/// Returns the leases that the host recalls.
fn recalls(host: &Host) -> Vec<u128> {
    let recalled = host.sent().into_iter().filter_map(|(_, message)| match message {
        Message::MemLenFin { lease, .. } => Some(lease.0),
        _ => None,
    });
    recalled.collect()
}

#[test]
fn second_copies_leave_all_others_what_they_had() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let (swap, regions) = (host.controller.spare(), host.controller.spare_for_regions());
    let lease = lend_copies(&mut host, 1, 4);
    assert_eq!((host.controller.spare(), host.controller.spare_for_regions()), (swap, regions));
    assert_eq!(host.controller.spare_for_copies(), regions - Bytes::gib(4));
    assert_eq!(host.controller.ledger().mirror, Bytes::gib(4));
    assert_eq!(host.controller.ledger().lent, Bytes::ZERO);
    // Stored copies count as used memory, and still leave others what they had.
    host.stored.insert(lease, Bytes::gib(4));
    host.tick(60, &[]);
    assert_eq!((host.controller.spare(), host.controller.spare_for_regions()), (swap, regions));
}

#[test]
fn second_copies_get_no_memory_that_others_have() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    lend(&mut host, 1, 5);
    let left = TOTAL.scaled(UPPER) - TOTAL.scaled(0.2) - Bytes::gib(5);
    host.receive("c", copies_req(2, left + Bytes::mib(64)));
    assert_eq!(host.rejection_sent(), (left, Reason::NoRoom));
}

#[test]
fn a_grant_takes_back_the_copies_that_are_in_its_way() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let (small, large) = (lend_copies(&mut host, 1, 1), lend_copies(&mut host, 2, 4));
    host.tick(20, &[]);
    assert_eq!(recalls(&host), [], "there is room for all");
    lend(&mut host, 3, 2);
    host.tick(20, &[]);
    assert_eq!(recalls(&host), [small.0], "the smallest lease that suffices");
    lend(&mut host, 4, 4);
    host.tick(20, &[]);
    assert!(recalls(&host).contains(&large.0), "{:?}", host.step);
    // Others still get memory meanwhile; second copies get none.
    assert_eq!(host.controller.spare_for_copies(), Bytes::ZERO);
}

#[test]
fn an_overloaded_host_takes_back_second_copies_first() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let (copies, other) = (lend_copies(&mut host, 1, 2), lend(&mut host, 2, 3));
    host.stored.insert(copies, Bytes::gib(2));
    host.stored.insert(other, Bytes::gib(3));
    // Two of ten GiB too much: the copies suffice, and one larger lease would, too.
    host.tick(81, &[]);
    assert_eq!(recalls(&host)[0], copies.0);
    let left: Vec<_> = host.controller.lent();
    let state = |lease| left.iter().find(|lent| lent.lease.lease == lease).map(|lent| lent.state);
    assert_eq!(state(copies), Some(LoanState::Recalled));
    // Back to T_lower it needs more than the copies have.
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let (copies, other) = (lend_copies(&mut host, 1, 3), lend(&mut host, 2, 3));
    host.stored.insert(copies, Bytes::gib(3));
    host.stored.insert(other, Bytes::gib(3));
    host.tick(85, &[]);
    assert_eq!(recalls(&host), [copies.0], "others keep theirs: {other}");
}

#[test]
fn vms_take_the_memory_of_second_copies_before_any_other() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let (other, copies) = (lend(&mut host, 1, 1), lend_copies(&mut host, 2, 2));
    // VMs grow into what is free, and beyond.
    let vm = VmMemory {
        name: "web".parse().unwrap(),
        floor: Bytes::ZERO,
        size: Bytes::gib(6),
        reserve: Bytes::ZERO,
        resident: Bytes::ZERO,
    };
    host.controller.note_own(OwnMemory { vms: vec![vm], ..OwnMemory::default() });
    assert_eq!(host.controller.ledger().broken(), Bytes::ZERO, "VMs may have that memory");
    host.tick(20, &[]);
    assert_eq!(recalls(&host), [copies.0], "and not {other}");
}

#[test]
fn copies_come_back_only_after_a_minute() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let copies = lend_copies(&mut host, 1, 5);
    host.lend("b", 2, Bytes::gib(2));
    host.tick(20, &[]);
    assert_eq!(recalls(&host), [copies.0]);
    host.receive("c", bor_fin(copies)).event(Event::LeaseFreed { lease: copies });
    let mut seconds = 0;
    while host.controller.spare_for_copies() == Bytes::ZERO {
        host.tick(20, &[]);
        seconds += 1;
        assert!(seconds < 100, "it takes second copies no more");
    }
    assert!((58..=62).contains(&seconds), "{seconds}");
    host.receive("d", req(9, Bytes::gib(1))).opened();
}
