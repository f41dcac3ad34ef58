//! Tests of the order to leave the cluster.

use aquifer_control::node::{Answer, Said};
use aquifer_control::{Action, Message, Reason};
use aquifer_page::Bytes;

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
fn a_host_that_is_about_to_borrow_leaves_when_it_has_not() {
    let mut shell = Shell::new();
    shell.period(20).borrow(1);
    assert_eq!(shell.leave().answers(), [], "it asks for offers");
    assert_eq!(shell.offers(&[("b", 4)]).answers(), [], "it asks b");
    let ended = shell.after(9).period(20).answers();
    assert_eq!(ended, [(1, Answer::NobodyLends(Bytes::gib(1))), (2, Answer::Left)]);
    assert_eq!(shell.period(20).answers(), [], "it answers once");
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
