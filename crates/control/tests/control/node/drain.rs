//! Tests of the order to drain, and of leases that stay.

use std::collections::BTreeMap;

use aquifer_control::node::{Contact, EventKind, Said, Work};
use aquifer_control::{Action, Event, LoanState, Message};
use aquifer_page::{Bytes, HostName, LeaseId};

use super::Shell;
use crate::host::{bor_fin, name, req};

fn recall(lease: LeaseId) -> Message {
    Message::MemLenFin { lease, generation: 0 }
}

/// Returns the reason why the only lease is still lent, if calls to `b` end like this.
fn why(shell: &Shell, contact: Option<Contact>) -> String {
    let peers: BTreeMap<HostName, Contact> =
        contact.into_iter().map(|contact| (name("b"), contact)).collect();
    let left = shell.node.left(&BTreeMap::new(), &peers);
    assert_eq!(left.len(), 1, "{left:?}");
    left[0].why.clone()
}

fn answers() -> Option<Contact> {
    Some(Contact::default())
}

#[test]
fn a_drain_runs_to_its_end_and_notes_it_once() {
    let mut shell = Shell::new();
    let (one, two) = (shell.lend("b", 1), shell.lend("c", 2));
    shell.drain(true);
    assert_eq!(shell.sent(), [("b".to_owned(), recall(one)), ("c".to_owned(), recall(two))]);
    let begins = "recalls all leases, 64MiB in all, and lends nothing".to_owned();
    assert_eq!(shell.notices(), [(EventKind::Drain, begins)]);
    for (borrower, lease) in [("b", one), ("c", two)] {
        shell.said(borrower, recall(lease), Said::Taken(None)).hear(borrower, bor_fin(lease));
        assert_eq!(shell.begun(), [Action::FreeLease { lease }]);
        assert_eq!(shell.period(20).notices(), [], "this host still frees the memory");
        shell.freed(lease);
    }
    let ends = "all leases are back".to_owned();
    assert_eq!(shell.period(20).notices(), [(EventKind::Drain, ends)]);
    assert_eq!(shell.period(20).notices(), []);
    assert!(
        shell.node.is_draining() && shell.node.left(&BTreeMap::new(), &BTreeMap::new()).is_empty()
    );
    assert_eq!(shell.drain(false).notices(), [(EventKind::Drain, "lends again".to_owned())]);
}

#[test]
fn a_drain_ordered_twice_recalls_once() {
    let mut shell = Shell::new();
    shell.lend("b", 1);
    assert_eq!(shell.drain(true).sent().len(), 1);
    assert!(shell.drain(true).outputs.is_empty());
    shell.drain(false);
    assert!(shell.drain(false).outputs.is_empty());
}

#[test]
fn a_silent_borrower_holds_a_drain_up_until_the_grace_ends() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    shell.drain(true).said("b", recall(lease), Said::Lost);
    for _ in 0..70 {
        assert_eq!(shell.period(20).sent(), [("b".to_owned(), recall(lease))]);
        shell.said("b", recall(lease), Said::Lost);
    }
    let silent = Contact { error: Some("timed out".to_owned()), ..Contact::default() };
    assert_eq!(why(&shell, Some(silent)), "b does not answer: timed out");
    assert_eq!(shell.after(20).period(20).begun(), [Action::FreeLease { lease }]);
    let [(EventKind::BorrowerLost, what)] = &shell.notices()[..] else {
        panic!("{:?}", shell.notices())
    };
    assert!(what.starts_with("this host frees lease "), "{what}");
    assert_eq!(shell.freed(lease).period(20).notices().len(), 1, "all leases are back");
}

#[test]
fn a_lease_stays_for_the_reason_that_matters_most() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    assert_eq!(why(&shell, answers()), "it is not recalled yet");
    shell.drain(true);
    assert_eq!(why(&shell, answers()), "b is moving it");
    shell.said("b", recall(lease), Said::Taken(Some("no room".to_owned())));
    assert_eq!(why(&shell, answers()), "b cannot move it yet: no room");
    let refuses = Contact { refused: true, error: Some("b is full".to_owned()), spare: None };
    assert_eq!(why(&shell, Some(refuses)), "b refuses: b is full");
    assert!(why(&shell, None).starts_with("b is no longer a peer, and its address is unknown"));
    shell.said("b", recall(lease), Said::Taken(None));
    assert_eq!(why(&shell, answers()), "b is moving it", "its last attempt did not fail");
    shell.hear("b", bor_fin(lease));
    assert_eq!(why(&shell, None), "this host is freeing its memory");
}

#[test]
fn a_drain_also_recalls_a_lease_that_was_opening() {
    let mut shell = Shell::new();
    shell.period(20).hear("b", req(1, Bytes::gib(1))).drain(true);
    assert_eq!(why(&shell, answers()), "this host is setting it up");
    let lease = shell.node.controller().lent()[0].lease.lease;
    let uris = vec!["here".to_owned()];
    shell.done(Work::Lease(lease), Event::LeaseOpened { lease, uris });
    assert_eq!(shell.period(20).sent(), [("b".to_owned(), recall(lease))]);
    assert_eq!(shell.node.controller().lent()[0].state, LoanState::Recalled);
}
