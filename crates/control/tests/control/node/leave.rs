//! Tests of the order to leave the cluster.

use std::collections::BTreeSet;

use aquifer_control::ledger::{Claim, Purpose};
use aquifer_control::node::{Answer, Input, Said};
use aquifer_control::{Action, Message, Reason};
use aquifer_page::{Bytes, Group, VolumeId};

use super::Shell;
use crate::host::{bor_fin, req};

#[test]
fn a_host_with_pages_elsewhere_or_of_others_stays() {
    let mut lender = Shell::new();
    let lease = lender.lend("b", 1);
    assert_eq!(lender.leave().failure(), "this host lends 1 leases and borrows 0 volumes");
    lender.drain(true).hear("b", bor_fin(lease));
    assert!(lender.leave().failure().starts_with("this host lends 1"), "it frees the memory");
    assert_eq!(lender.freed(lease).leave().answer(), Answer::Left);

    let mut borrower = Shell::new();
    borrower.swap();
    assert_eq!(borrower.leave().failure(), "this host lends 0 leases and borrows 1 volumes");
}

#[test]
fn a_host_that_is_about_to_borrow_stays_until_it_has_not() {
    let mut shell = Shell::new();
    shell.period(20).borrow(1);
    let about = "this host is about to borrow or to return memory";
    assert_eq!(shell.leave().tie(), about, "it asks for offers");
    shell.offers(&[("b", 4)]);
    assert_eq!(shell.leave().tie(), about, "it asks b");
    let ended = shell.after(9).period(20).answers();
    assert_eq!(ended, [(1, Answer::NobodyLends(Bytes::gib(1)))]);
    assert_eq!(shell.leave().answer(), Answer::Left);
}

#[test]
fn a_host_that_expects_a_vm_stays() {
    let about = "a VM or a region is about to begin on this host";
    let mut shell = Shell::new();
    let (volume, leases) = (VolumeId(7), BTreeSet::from([super::LEASE]));
    shell.period(20).input(Input::Expect { volume, leases });
    assert_eq!(shell.leave().tie(), about);
    assert_eq!(shell.input(Input::Miss { volume }).leave().answer(), Answer::Left);

    let mut shell = Shell::new();
    let claim = Claim {
        name: "web".parse().unwrap(),
        purpose: Purpose::Cache,
        group: Group::default(),
        bytes: Bytes::mib(1),
        reserve: Bytes::ZERO,
    };
    let ticket = shell.period(20).ticket();
    shell.input(Input::Claim { claim: claim.clone(), overcommit: false, ticket });
    assert_eq!(shell.leave().tie(), about);
    let ticket = shell.ticket();
    let ended = Claim { bytes: Bytes::ZERO, ..claim };
    shell.input(Input::Claim { claim: ended, overcommit: false, ticket });
    assert_eq!(shell.leave().answer(), Answer::Left);
}

#[test]
fn a_host_that_left_neither_lends_nor_borrows() {
    let mut shell = Shell::new();
    assert_eq!(shell.period(20).leave().answer(), Answer::Left);
    shell.drain(false).hear("b", req(1, Bytes::gib(1)));
    let [(to, Message::MemBorRej { reason: Reason::Draining, .. })] = &shell.sent()[..] else {
        panic!("{:?}", shell.outputs)
    };
    assert_eq!(to, "b");
    assert_eq!(shell.borrow(1).failure(), "this host leaves its cluster");
    assert!(!shell.period(95).asks_offers() && shell.begun().is_empty());
    assert_eq!(shell.leave().answer(), Answer::Left, "the answer was lost");
    shell.said("b", Message::MemLenFin { lease: super::LEASE, generation: 0 }, Said::Lost);
    assert!(!shell.begun().iter().any(|action| matches!(action, Action::Activate(_))));
}
