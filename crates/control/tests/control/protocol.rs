//! Tests of the questions that \[Ge23\] leaves open: permitted roles, several lenders, lost
//! messages, failures, restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::{
    Action, Cause, Config, Controller, Event, LentLease, LiveVolume, LoanState, Memory, Message,
    Offer, Owner, Reason, Refusal, RequestId, Restored, Role, What,
};
use aquifer_page::{Bytes, Group, LeaseId, VolumeId};

use crate::host::{Host, TOTAL, ack, bor_fin, config, len_fin, name, rej, req};

#[test]
fn borrowing_asking_and_overloaded_hosts_grant_nothing() {
    let mut host = Host::new(config());
    host.receive("c", req(9, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Starting));
    host.tick(85, &[]).receive("c", req(9, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Overloaded));
    host.tick(50, &[("b", 4)])
        .event(Event::Borrow { bytes: Bytes::gib(1), group: Group::default() });
    let (_, request, bytes) = host.request_sent();
    host.receive("c", req(9, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Asking));
    host.receive("b", ack(request, 1, bytes)).receive("c", req(9, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Borrowing));
}

#[test]
fn a_host_that_is_setting_up_a_lease_does_not_ask() {
    let mut host = Host::new(config());
    host.tick(20, &[]).receive("b", req(1, Bytes::gib(1))).opened();
    host.tick(90, &[("c", 4)]).does_nothing();
    host.event(Event::Borrow { bytes: Bytes::gib(1), group: Group::default() });
    let refused = What::BorrowRefused {
        bytes: Bytes::gib(1),
        cause: Cause::ByHand,
        refusal: Refusal::Lending,
    };
    assert_eq!(host.step.decisions[0].what, refused);
}

#[test]
fn of_two_asking_hosts_the_first_by_name_asks_again_first() {
    for (other, wait) in [("a", 60), ("z", 30)] {
        let mut host = Host::new(config());
        let (_, request, _) = host.tick(85, &[(other, 4)]).request_sent();
        host.receive(other, rej(request, Bytes::ZERO, Reason::Asking));
        let retry = Some(Duration::from_secs(wait));
        let expected = What::NobodyLends { wanted: Bytes::gib(1), cause: Cause::Overload, retry };
        assert_eq!(host.step.decisions.last().map(|decision| &decision.what), Some(&expected));
        host.now += Duration::from_secs(wait - 2);
        host.tick(85, &[(other, 4)]).does_nothing();
        host.tick(85, &[(other, 4)]).request_sent();
    }
}

#[test]
fn a_repeated_request_is_answered_with_the_same_lease() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).receive("b", req(1, Bytes::gib(1))).opened().lease;
    host.receive("b", req(1, Bytes::gib(1))).does_nothing();
    host.event(Event::LeaseOpened { lease, uris: vec!["there".to_owned()] });
    host.receive("b", req(1, Bytes::gib(1)));
    assert_eq!(host.sent(), [("b", &ack(RequestId(1), lease.0, Bytes::gib(1)))]);
    // The same number from another host is another request.
    assert_ne!(host.receive("c", req(1, Bytes::gib(1))).opened().lease, lease);
    host.receive("b", bor_fin(lease)).event(Event::LeaseFreed { lease });
    host.receive("b", req(1, Bytes::gib(1)));
    assert_eq!(host.rejection_sent().1, Reason::Settled);
}

#[test]
fn only_the_holder_of_a_lease_can_end_it() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).lend("b", 1, Bytes::gib(1));
    host.receive("c", bor_fin(lease));
    assert_eq!(host.step.decisions[0].what, What::Stranger { from: name("c"), lease });
    assert!(host.step.actions.is_empty());
    let mut host = Host::new(config());
    host.borrow();
    host.receive("c", len_fin(1));
    assert!(host.step.actions.is_empty(), "not by a host that is not the lender either");
}

#[test]
fn an_unanswered_request_repeats_and_then_goes_elsewhere() {
    let mut host = Host::new(config());
    let offers = [("b", 4), ("c", 3)];
    let (_, first, bytes) = host.tick(85, &offers).request_sent();
    assert_eq!(host.tick(85, &offers).request_sent(), ("b".to_owned(), first, bytes));
    (0..3).for_each(|_| drop(host.tick(85, &offers).request_sent()));
    let (to, second, _) = host.tick(85, &offers).request_sent();
    assert_eq!(to, "c");
    host.receive("b", ack(first, 1, bytes));
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))], "too late");
    host.receive("c", ack(second, 2, bytes)).activates();
}

#[test]
fn a_lender_with_less_room_is_asked_again_for_that_room() {
    let mut host = Host::new(config());
    let (_, request, _) = host.tick(85, &[("b", 4), ("c", 3)]).request_sent();
    let (to, request, bytes) =
        host.receive("b", rej(request, Bytes::mib(200), Reason::NoRoom)).request_sent();
    assert_eq!((to.as_str(), bytes), ("c", Bytes::gib(1)), "the other one has more now");
    let (to, _, bytes) =
        host.receive("c", rej(request, Bytes::ZERO, Reason::NoRoom)).request_sent();
    assert_eq!((to.as_str(), bytes), ("b", Bytes::mib(192)));
}

#[test]
fn sizes_that_no_honest_peer_sends_are_turned_down() {
    for bytes in [Bytes::ZERO, Bytes(1), Bytes::gib(2), Bytes(u64::MAX), Bytes(u64::MAX << 26)] {
        let mut host = Host::new(config());
        host.tick(20, &[]).receive("b", req(1, Bytes(bytes.0 | 1)));
        assert_eq!(host.rejection_sent().1, Reason::Invalid);
        let (_, request, _) = host.tick(85, &[("b", 4)]).request_sent();
        host.receive("b", ack(request, 1, bytes));
        assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))], "{bytes} for 1GiB");
        assert_eq!(host.role(), Role::Neutral);
    }
    let mut host = Host::new(config());
    host.tick(20, &[]).receive("b", req(1, Bytes(u64::MAX << 26)));
    assert_eq!(host.rejection_sent().1, Reason::NoRoom);
}

#[test]
fn a_late_ack_of_an_abandoned_request_gets_a_fin() {
    let mut host = Host::new(config());
    let (_, request, bytes) = host.tick(85, &[("b", 4)]).request_sent();
    host.tick(50, &[("b", 4)]);
    assert!(matches!(host.step.decisions[0].what, What::Abandons { .. }));
    host.receive("b", ack(request, 1, bytes));
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))]);
    assert_eq!(host.role(), Role::Neutral);
}

#[test]
fn a_fin_is_repeated_until_it_is_delivered() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    host.tick(20, &[]).event(Event::Deactivated { volume });
    for _ in 0..3 {
        assert_eq!(host.tick(20, &[]).sent(), [("b", &bor_fin(LeaseId(1)))]);
    }
    host.event(Event::Delivered { to: name("b"), message: bor_fin(LeaseId(1)) });
    host.tick(20, &[]).does_nothing();
}

#[test]
fn a_recall_is_repeated_until_the_borrower_is_done() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).lend("b", 1, Bytes::gib(1));
    let recall = Message::MemLenFin { lease, generation: 0 };
    for _ in 0..3 {
        assert_eq!(host.tick(85, &[]).sent(), [("b", &recall)]);
        host.event(Event::Delivered { to: name("b"), message: recall.clone() });
    }
    host.receive("b", bor_fin(lease));
    assert_eq!(host.step.actions, [Action::FreeLease { lease }]);
}

#[test]
fn a_recall_that_overtakes_its_ack_leaves_nothing_in_use() {
    let mut host = Host::new(config());
    let (_, request, bytes) = host.tick(85, &[("b", 4)]).request_sent();
    host.receive("b", len_fin(1));
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))]);
    host.receive("b", ack(request, 1, bytes));
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))], "the lease may be freed already");
    assert_eq!(host.role(), Role::Neutral);
}

/// Returns a host that wants 1 GiB, has half of it from `b` as lease 1, and has asked `c` for the
/// rest.
fn half_way() -> (Host, RequestId) {
    let mut host = Host::new(config());
    let offers = vec![("b", 640), ("c", 512)];
    let lenders =
        offers.into_iter().map(|(host, mib)| Offer::new(name(host), Bytes::mib(mib))).collect();
    let memory = Memory { total: TOTAL, used: Bytes::gib(9), ..Memory::default() };
    let (_, request, bytes) =
        host.event(Event::Tick { memory, stored: BTreeMap::new(), lenders }).request_sent();
    let (to, next, missing) = host.receive("b", ack(request, 1, bytes)).request_sent();
    assert_eq!((to.as_str(), missing), ("c", Bytes::mib(384)));
    host.receive("b", ack(request, 1, bytes)).does_nothing();
    (host, next)
}

#[test]
fn several_lenders_fill_one_volume_together() {
    let (mut host, request) = half_way();
    let volume = host.receive("c", ack(request, 2, Bytes::mib(384))).activates();
    let leases: Vec<_> =
        volume.leases.iter().map(|lease| (lease.lender.as_str(), lease.bytes)).collect();
    assert_eq!(leases, [("b", Bytes::mib(640)), ("c", Bytes::mib(384))]);
    assert_eq!(volume.bytes, Bytes::gib(1));
}

#[test]
fn a_lease_recalled_during_a_round_goes_back_at_once() {
    let (mut host, request) = half_way();
    host.receive("b", len_fin(1));
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))]);
    let volume = host.receive("c", ack(request, 2, Bytes::mib(384))).activates();
    assert_eq!(volume.leases.len(), 1);
}

#[test]
fn a_round_given_up_gives_back_what_it_has_got() {
    let (mut host, request) = half_way();
    host.tick(20, &[]);
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))]);
    host.receive("c", ack(request, 2, Bytes::mib(384)));
    assert_eq!(host.sent(), [("c", &bor_fin(LeaseId(2)))]);
}

#[test]
fn a_partial_loan_is_used_when_no_lender_has_the_rest() {
    let (mut host, request) = half_way();
    let volume = host.receive("c", rej(request, Bytes::ZERO, Reason::Borrowing)).activates();
    assert_eq!(volume.bytes, Bytes::mib(640));
}

#[test]
fn a_replacement_is_borrowed_before_a_recalled_lease_is_left() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    host.tick(70, &[("b", 4), ("c", 2)]);
    let (to, request, bytes) = host.receive("b", len_fin(1)).request_sent();
    assert_eq!((to.as_str(), bytes), ("c", Bytes::gib(1)));
    host.receive("c", ack(request, 2, bytes));
    match &host.step.actions[..] {
        [Action::Evacuate { volume: of, lease, onto, .. }] => {
            assert_eq!((*of, *lease, onto[0].lease), (volume, LeaseId(1), LeaseId(2)));
        }
        other => panic!("an evacuation was expected, not {other:?}"),
    }
    // The move fails without using the new lease. So that lease goes back, and the next recall
    // starts another attempt.
    let (lease, unused, why) = (LeaseId(1), vec![LeaseId(2)], "no".to_owned());
    host.event(Event::EvacuationFailed { lease, unused, why });
    assert_eq!(host.sent(), [("c", &bor_fin(LeaseId(2)))]);
    host.receive("b", len_fin(1));
    assert_eq!(
        host.step.actions,
        [Action::Evacuate { volume, lease, onto: Vec::new(), spills: true }]
    );
}

#[test]
fn a_borrower_whose_volume_is_spilled_borrows_again() {
    let mut host = Host::new(config());
    host.borrow();
    host.receive("b", len_fin(1));
    host.event(Event::Evacuated { lease: LeaseId(1), unused: Vec::new() });
    host.event(Event::Delivered { to: name("b"), message: bor_fin(LeaseId(1)) });
    // Half of the volume is in the spill file, and another host has memory to spare.
    let (to, request, bytes) = host.read(85, Bytes::mib(512), &[("c", 4)]).request_sent();
    assert_eq!((to.as_str(), bytes), ("c", Bytes::gib(1)));
    host.receive("c", ack(request, 2, bytes)).activates();
}

#[test]
fn a_borrower_with_nearly_full_swap_borrows_up_to_the_limit() {
    let mut host = Host::new(Config { max_borrowed: Bytes::mib(1536), ..config() });
    host.borrow();
    host.read(85, Bytes::mib(768), &[("b", 4)]).does_nothing();
    let (_, request, bytes) = host.read(85, Bytes::mib(769), &[("b", 4)]).request_sent();
    assert_eq!(bytes, Bytes::mib(512), "what max_borrowed leaves");
    let volume = host.receive("b", ack(request, 2, bytes)).activates().volume;
    host.event(Event::Activated { volume });
    host.read(85, Bytes::mib(1500), &[("b", 4)]);
    let (borrowed, max) = (Bytes::mib(1536), Bytes::mib(1536));
    let refused = What::BorrowRefused {
        bytes: Bytes::gib(1),
        cause: Cause::Overload,
        refusal: Refusal::OverMax { borrowed, max },
    };
    assert_eq!(host.step.decisions[0].what, refused);
}

#[test]
fn a_volume_that_cannot_be_made_gives_its_leases_back() {
    let mut host = Host::new(config());
    let (_, request, bytes) = host.tick(85, &[("b", 4)]).request_sent();
    let volume = host.receive("b", ack(request, 1, bytes)).activates().volume;
    host.event(Event::ActivationFailed { volume, why: "no loop device".to_owned() });
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))]);
    assert_eq!(host.role(), Role::Neutral);
    assert!(host.step.decisions[0].to_string().contains("no loop device"));
}

#[test]
fn a_failed_deactivation_is_retried_after_the_cooldown() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    host.tick(20, &[])
        .event(Event::DeactivationFailed { volume, why: "swapoff: no memory".to_owned() });
    assert_eq!(host.role(), Role::Borrower);
    assert!(host.tick(20, &[]).step.actions.is_empty());
    host.now += config().cooldown;
    assert_eq!(host.tick(20, &[]).step.actions, [Action::Deactivate { volume }]);
}

#[test]
fn a_lease_that_cannot_be_set_up_is_rejected_and_leaves_nothing() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).receive("b", req(1, Bytes::gib(1))).opened().lease;
    host.event(Event::LeaseFailed { lease, why: "tmpfs is full".to_owned() });
    assert_eq!(host.rejection_sent().1, Reason::Failed);
    assert_eq!(host.role(), Role::Neutral);
    assert!(host.controller.lent().is_empty());
}

#[test]
fn the_early_signal_starts_a_request_or_recalls_one_lease() {
    let pressure =
        Memory { total: TOTAL, used: Bytes::gib(2), pressure: true, ..Memory::default() };
    let reading = |lenders| Event::Tick { memory: pressure, stored: BTreeMap::new(), lenders };
    let mut host = Host::new(config());
    host.event(reading(vec![Offer::new(name("b"), Bytes::gib(4))])).request_sent();
    let mut host = Host::new(config());
    host.tick(20, &[]);
    host.lend("b", 1, Bytes::gib(1));
    host.lend("c", 2, Bytes::gib(1));
    host.event(reading(Vec::new()));
    assert_eq!(host.sent().len(), 1);
}

#[test]
fn a_restarted_lender_goes_on_with_the_leases_it_finds() {
    let mut before = Host::new(config());
    let lease = before.tick(20, &[]).lend("b", 1, Bytes::gib(1));
    let lent = vec![(before.controller.lent()[0].lease.clone(), vec!["elsewhere".to_owned()])];
    let found = Restored { lent, ..Restored::default() };
    let mut host = Host::of(Controller::restore(name("me"), config(), 2000, Duration::ZERO, found));
    assert_eq!(host.role(), Role::Lender);
    host.tick(20, &[]);
    assert!(matches!(host.sent()[..], [("b", Message::MemBorAck { .. })]), "do you still hold it?");
    host.receive("b", req(1, Bytes::gib(1)));
    assert!(
        matches!(host.sent()[..], [("b", Message::MemBorAck { lease: same, .. })] if *same == lease)
    );
    host.event(Event::BorrowerSeen { lease });
    assert_eq!(host.controller.lent()[0].state, LoanState::Held);
    host.receive("b", bor_fin(lease)).event(Event::LeaseFreed { lease });
    assert_eq!(host.role(), Role::Neutral);
}

#[test]
fn a_borrower_that_came_up_anew_is_asked_for_its_leases_at_once() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).lend("b", 1, Bytes::gib(1));
    host.event(Event::BorrowerSeen { lease }).tick(20, &[]).does_nothing();
    host.event(Event::Anew { host: name("c") }).does_nothing();
    let asks = |host: &Host| matches!(host.sent()[..], [("b", Message::MemBorAck { .. })]);
    assert!(asks(host.event(Event::Anew { host: name("b") })));
    let resend = config().resend;
    host.now += resend;
    assert!(asks(host.tick(20, &[])), "the question comes again until it is taken in");
    let question = host.sent()[0].1.clone();
    host.event(Event::Delivered { to: name("b"), message: question });
    host.now += resend;
    host.tick(20, &[]).does_nothing();
    assert_eq!(host.controller.lent()[0].state, LoanState::Held);
}

#[test]
fn a_restarted_borrower_keeps_its_volumes_and_returns_the_rest() {
    let mut before = Host::new(config());
    let (_, request, bytes) = before.tick(85, &[("b", 4)]).request_sent();
    let volume = before.receive("b", ack(request, 1, bytes)).activates();
    let found = Restored { volumes: vec![volume.clone()], ..Restored::default() };
    let mut host = Host::of(Controller::restore(name("me"), config(), 2000, Duration::ZERO, found));
    assert_eq!(host.role(), Role::Borrower);
    host.receive("b", ack(request, 1, bytes)).does_nothing();
    host.receive("b", ack(RequestId(77), 2, bytes));
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(2)))]);
    host.tick(20, &[]);
    assert!(host.step.actions.contains(&Action::Deactivate { volume: volume.volume }));
}

#[test]
fn a_restored_host_that_borrows_and_lends_recalls_its_leases() {
    let lease = LentLease {
        lease: LeaseId(5),
        borrower: name("c"),
        owner: Owner::Swap,
        group: Group::default(),
        bytes: Bytes::gib(1),
        request: RequestId(5),
        generation: 0,
        next: BTreeSet::new(),
        goes_first: false,
    };
    let volume = LiveVolume {
        volume: VolumeId(6),
        bytes: Bytes::gib(1),
        owner: Owner::Swap,
        group: Group::default(),
        cause: Cause::Overload,
        leases: Vec::new(),
        copies: Vec::new(),
    };
    let lent = vec![(lease, vec!["there".to_owned()])];
    let found = Restored { lent, volumes: vec![volume], ..Restored::default() };
    let mut host = Host::of(Controller::restore(name("me"), config(), 2000, Duration::ZERO, found));
    host.tick(70, &[]);
    assert!(host.sent().contains(&("c", &Message::MemLenFin { lease: LeaseId(5), generation: 0 })));
    host.event(Event::Deactivated { volume: VolumeId(6) });
    assert_eq!(host.role(), Role::Borrower);
    host.receive("c", bor_fin(LeaseId(5))).event(Event::LeaseFreed { lease: LeaseId(5) });
    assert_eq!(host.role(), Role::Neutral);
}

#[test]
fn the_operator_s_request_is_refused_with_the_reason() {
    let mut host = Host::new(config());
    host.tick(20, &[("b", 9)]);
    let borrow = |bytes| Event::Borrow { bytes, group: Group::default() };
    for (bytes, words) in [
        (Bytes::ZERO, "at least one byte"),
        (Bytes::gib(4), "borrow.max is 3GiB"),
        (Bytes(u64::MAX), "borrow.max"),
    ] {
        let text = host.event(borrow(bytes)).step.decisions[0].to_string();
        assert!(text.contains(words), "{text}");
    }
    host.event(borrow(Bytes::gib(1))).request_sent();
    let text = host.event(borrow(Bytes::gib(1))).step.decisions[0].to_string();
    assert!(text.contains("asking for memory already"), "{text}");
}

#[test]
fn a_return_during_activation_takes_effect_after_it() {
    let mut host = Host::new(config());
    let (_, request, bytes) = host.tick(85, &[("b", 4)]).request_sent();
    let volume = host.receive("b", ack(request, 1, bytes)).activates().volume;
    assert!(host.event(Event::Return { volume: None }).step.actions.is_empty());
    host.event(Event::Activated { volume });
    assert_eq!(host.step.actions, [Action::Deactivate { volume }]);
}

#[test]
fn without_borrowing_a_host_borrows_by_order_and_to_evacuate() {
    let mut host = Host::new(Config { borrows: false, ..config() });
    host.tick(85, &[("b", 4)]).does_nothing();
    host.event(Event::Borrow { bytes: Bytes::gib(1), group: Group::default() });
    let (_, request, bytes) = host.request_sent();
    host.receive("b", ack(request, 5, bytes));
    let volume = host.activates().volume;
    host.event(Event::Activated { volume });
    host.read(95, Bytes::gib(1), &[("c", 4)]).does_nothing();
    host.receive("b", len_fin(5));
    assert_eq!(host.request_sent().0, "c");
}

#[test]
fn a_refusal_is_heard_and_the_next_lender_is_asked_at_once() {
    let mut host = Host::new(config());
    let (to, request, bytes) = host.tick(85, &[("b", 4), ("c", 3)]).request_sent();
    assert_eq!(to, "b");
    let message = req(request.0, bytes);
    let why = "me is not a peer of b".to_owned();
    host.event(Event::Refused { by: name("b"), message, why });
    assert_eq!(host.request_sent().0, "c");
    let text = host.step.decisions[0].to_string();
    assert!(
        text.contains("gets no 1GiB from b, which refuses the request: me is not a peer of b"),
        "{text}"
    );
}

#[test]
fn a_lender_that_drains_refuses_what_is_asked_of_it() {
    let mut host = Host::new(Config { lends: false, ..config() });
    host.tick(20, &[]).receive("b", req(1, Bytes::gib(1)));
    assert_eq!(host.rejection_sent(), (Bytes::ZERO, Reason::Draining));
}

#[test]
fn a_retried_move_asks_again_for_the_missing_memory() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    host.receive("b", len_fin(1));
    host.event(Event::EvacuationFailed {
        lease: LeaseId(1),
        unused: Vec::new(),
        why: "no room".to_owned(),
    });
    host.tick(70, &[("c", 4)]).receive("b", len_fin(1));
    let (to, request, bytes) = host.request_sent();
    assert_eq!((to.as_str(), bytes), ("c", Bytes::gib(1)));
    host.receive("c", ack(request, 2, bytes));
    assert!(
        matches!(&host.step.actions[..], [Action::Evacuate { volume: id, .. }] if *id == volume)
    );
    // The borrowed lease is in the volume, so failed moves ask for nothing more.
    host.event(Event::EvacuationFailed {
        lease: LeaseId(1),
        unused: Vec::new(),
        why: "slow".to_owned(),
    });
    host.tick(70, &[("c", 4)]).receive("b", len_fin(1));
    assert!(matches!(&host.step.actions[..], [Action::Evacuate { onto, .. }] if onto.is_empty()));
}
