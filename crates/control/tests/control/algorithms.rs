//! Tests of every line of Algorithms 1-4 of \[Ge23\]. `protocol.rs` tests lost and repeated
//! messages.

use aquifer_control::{Action, Cause, Config, Event, Message, Reason, RequestId, Role, Shareable};
use aquifer_page::{Bytes, LeaseId};

use crate::host::{Host, ack, bor_fin, config, len_fin, req};

// Algorithm 1: the controller.

#[test]
fn algorithm_1_line_1_each_period_decides_on_the_hosts_memory() {
    let mut host = Host::new(config());
    host.tick(50, &[("b", 4)]).does_nothing();
    host.tick(85, &[("b", 4)]).request_sent();
}

#[test]
fn algorithm_1_lines_2_3_a_neutral_host_runs_algorithm_2() {
    let mut host = Host::new(config());
    assert_eq!(host.role(), Role::Neutral, "initialization");
    assert_eq!(host.tick(85, &[("b", 4)]).request_sent().0, "b");
}

#[test]
fn algorithm_1_lines_4_5_a_borrower_runs_algorithm_3() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    assert_eq!(host.tick(20, &[]).step.actions, [Action::Deactivate { volume }]);
}

#[test]
fn algorithm_1_lines_6_8_an_overloaded_lender_does_not_borrow() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).lend("b", 1, Bytes::gib(1));
    host.tick(85, &[("c", 4)]);
    assert_eq!(host.sent(), [("b", &Message::MemLenFin { lease, generation: 0 })]);
}

// Algorithm 2: Neutral.

#[test]
fn algorithm_2_line_1_a_host_without_request_stays_neutral() {
    let mut host = Host::new(config());
    host.tick(80, &[("b", 4)]).does_nothing();
    assert_eq!(host.role(), Role::Neutral);
}

#[test]
fn algorithm_2_lines_2_3_a_rejection_names_the_spare() {
    // Eq. 2 and T_upper: 8 GiB less the 5 GiB used.
    let mut host = Host::new(config());
    host.tick(50, &[]).receive("b", req(1, Bytes::gib(3) + Bytes::mib(64)));
    assert_eq!(host.rejection_sent(), (Bytes::gib(3), Reason::NoRoom));
    assert_eq!(host.role(), Role::Neutral);
    // Eq. 1: 10 GiB less the 9 GiB reserved.
    let mut host = Host::new(Config {
        shareable: Shareable::Preconfigured { reserved: Bytes::gib(9) },
        ..config()
    });
    host.tick(50, &[]).receive("b", req(1, Bytes::gib(1) + Bytes::mib(64)));
    assert_eq!(host.rejection_sent(), (Bytes::gib(1), Reason::NoRoom));
}

#[test]
fn algorithm_2_lines_4_5_an_overloaded_host_asks_for_memory() {
    let mut host = Host::new(config());
    host.tick(80, &[("b", 4)]).does_nothing();
    let (to, _, bytes) = host.tick(81, &[("b", 4), ("c", 3)]).request_sent();
    assert_eq!((to.as_str(), bytes), ("b", Bytes::gib(1)));
    assert_eq!(host.role(), Role::Neutral, "asking is not borrowing yet");
}

#[test]
fn algorithm_2_lines_6_8_an_ack_makes_the_host_a_borrower() {
    let mut host = Host::new(config());
    let (_, request, bytes) = host.tick(85, &[("b", 4)]).request_sent();
    let volume = host.receive("b", ack(request, 1, bytes)).activates();
    assert_eq!(volume.leases.len(), 1);
    assert_eq!(volume.leases[0].uris, ["there"]);
    assert_eq!((volume.bytes, volume.cause), (Bytes::gib(1), Cause::Overload));
    assert_eq!(host.role(), Role::Borrower);
}

#[test]
fn algorithm_2_lines_9_13_a_grant_precedes_the_ack_and_the_role() {
    let mut host = Host::new(config());
    let lease = host.tick(50, &[]).receive("b", req(1, Bytes::gib(3))).opened();
    assert_eq!(host.role(), Role::Neutral);
    host.event(Event::LeaseOpened { lease: lease.lease, uris: vec!["there".to_owned()] });
    assert_eq!(host.sent(), [("b", &ack(RequestId(1), lease.lease.0, Bytes::gib(3)))]);
    assert_eq!(host.role(), Role::Lender);
}

// Algorithm 3: Borrower.

#[test]
fn algorithm_3_lines_1_2_a_borrower_in_need_stays_one() {
    let mut host = Host::new(config());
    host.borrow();
    host.read(60, Bytes::ZERO, &[]).does_nothing();
    host.read(55, Bytes::mib(512), &[]).does_nothing();
    host.read(51, Bytes::mib(921) + Bytes::mib(1), &[]).does_nothing();
    assert_eq!(host.role(), Role::Borrower);
}

#[test]
fn algorithm_3_line_1_a_recalled_lease_empties_before_the_fin() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    host.receive("b", len_fin(1));
    let evacuate = Action::Evacuate { volume, lease: LeaseId(1), onto: Vec::new(), spills: true };
    assert_eq!(host.step.actions, [evacuate], "b is not asked, and no other host is known");
    host.event(Event::Evacuated { lease: LeaseId(1), unused: Vec::new() });
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))]);
    assert_eq!(host.role(), Role::Borrower, "the volume lives on in spill");
}

#[test]
fn algorithm_3_lines_3_6_volume_lease_and_role_end_in_order() {
    let mut host = Host::new(config());
    let volume = host.borrow();
    host.read(50, Bytes::mib(1023), &[]);
    assert_eq!(host.step.actions, [Action::Deactivate { volume }], "line 4");
    assert_eq!(host.role(), Role::Borrower);
    host.event(Event::Deactivated { volume });
    assert_eq!(host.sent(), [("b", &bor_fin(LeaseId(1)))], "line 5");
    assert_eq!(host.role(), Role::Neutral, "line 6");
}

// Algorithm 4: Lender.

#[test]
fn algorithm_4_lines_1_2_without_a_fin_a_lender_stays_one() {
    let mut host = Host::new(config());
    let lease = host.tick(20, &[]).lend("b", 1, Bytes::gib(1));
    host.event(Event::BorrowerSeen { lease });
    host.tick(80, &[]).does_nothing();
    assert_eq!(host.role(), Role::Lender);
}

#[test]
fn algorithm_4_lines_3_4_overload_recalls_the_fewest_leases() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let leases =
        [("b", 1), ("c", 2), ("d", 3)].map(|(to, request)| host.lend(to, request, Bytes::gib(2)));
    for (lease, gib) in leases.into_iter().zip([1, 2, 2]) {
        host.event(Event::BorrowerSeen { lease });
        host.stored.insert(lease, Bytes::gib(gib));
    }
    // 2.1 GiB above T_lower M_t: two leases hold that much, no single one does.
    host.tick(81, &[]);
    let recalled: Vec<_> = host.sent().iter().map(|(to, _)| (*to).to_owned()).collect();
    assert_eq!(recalled, ["d", "b"]);
    assert_eq!(host.role(), Role::Lender, "until all leases are back");
    assert_eq!(host.controller.spare(), Bytes::ZERO);
}

#[test]
fn algorithm_4_lines_5_7_the_last_fin_makes_the_host_neutral() {
    let mut host = Host::new(config());
    host.tick(20, &[]);
    let leases = [("b", 1), ("c", 2)].map(|(to, request)| host.lend(to, request, Bytes::gib(1)));
    for (lease, from, role) in [(leases[0], "b", Role::Lender), (leases[1], "c", Role::Neutral)] {
        host.receive(from, bor_fin(lease));
        assert_eq!(host.step.actions, [Action::FreeLease { lease }], "line 6");
        assert_eq!(host.role(), Role::Lender);
        host.event(Event::LeaseFreed { lease });
        assert_eq!(host.role(), role, "line 7");
    }
}
