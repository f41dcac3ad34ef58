//! Tests of orders to borrow and to return, with failures, repetitions and late results.

use aquifer_control::node::{Answer, Contact, Readings, Said, Work, nobody_lends};
use aquifer_control::{Action, Config, Event, Memory, Message, Restored};
use aquifer_page::{Bytes, VolumeId};

use super::{LEASE, Shell, memory};
use crate::host::{bor_fin, len_fin, name};

#[test]
fn a_borrowing_waits_for_offers_and_ends_with_its_volume() {
    let mut shell = Shell::new();
    assert!(shell.period(20).borrow(1).asks_offers());
    let volume = shell.offers(&[("b", 4)]).granted();
    assert_eq!(shell.node.priority_of(volume), Some(7));
    let order = shell.tickets - 1;
    shell.done(Work::Volume(volume), Event::Activated { volume });
    assert_eq!(shell.answers(), [(order, Answer::Borrowed(volume))]);
    assert_eq!(shell.node.priority_of(volume), None, "the order is over");
}

#[test]
fn a_second_borrowing_is_refused_while_one_is_in_progress() {
    let mut shell = Shell::new();
    shell.period(20).borrow(1).borrow(1);
    assert_eq!(shell.failure(), "another 'aquifer host borrow' is in progress");
    assert!(!shell.asks_offers());
}

#[test]
fn a_failed_borrowing_tells_why() {
    let mut shell = Shell::new();
    shell.period(20).borrow(1).offers(&[]);
    assert_eq!(shell.answer(), Answer::NobodyLends(Bytes::gib(1)));
    shell.borrow(9).offers(&[("b", 4)]);
    assert!(shell.failure().starts_with("this host does not borrow 9GiB"));
    let volume = shell.borrow(1).offers(&[("b", 4)]).granted();
    let order = shell.tickets - 1;
    let why = "no loop device".to_owned();
    shell.done(Work::Volume(volume), Event::ActivationFailed { volume, why });
    assert!(matches!(&shell.answers()[..], [(to, Answer::Failed(failed))]
            if *to == order && failed.error == "no loop device"));
    assert_eq!(shell.sent(), [("b".to_owned(), bor_fin(LEASE))]);
}

#[test]
fn a_return_ends_if_its_volume_never_starts() {
    let mut shell = Shell::new();
    let volume = shell.period(20).borrow(1).offers(&[("b", 4)]).granted();
    shell.give_back(Some(volume));
    let (returned, why) = (shell.tickets, "no loop device".to_owned());
    shell.done(Work::Volume(volume), Event::ActivationFailed { volume, why });
    shell.said("b", bor_fin(LEASE), Said::Taken(None));
    assert!(shell.answers().contains(&(returned, Answer::Returned(vec![volume]))));
}

#[test]
fn an_order_is_not_answered_by_the_refusal_of_an_overload() {
    let limited = Config { max_borrowed: Bytes::gib(1), ..crate::host::config() };
    let mut shell = Shell::with(Restored::default(), limited);
    shell.swap();
    shell.period(20).borrow(2);
    let memory = Memory { swap_used: Bytes::mib(1000), ..memory(90) };
    shell.after(1).read(Readings { memory, ..Readings::default() }).offers(&[("b", 4)]);
    assert!(shell.failure().starts_with("this host does not borrow 2GiB"), "{}", shell.failure());
}

#[test]
fn a_borrowing_that_nobody_meets_names_each_peer_once() {
    let error = |text: &str| Some(text.to_owned());
    let peers = [
        ("b", Contact { refused: true, error: error("b: no"), spare: None }),
        ("c", Contact { refused: false, error: error("timed out"), spare: None }),
        ("d", Contact { refused: false, error: error("taken"), spare: Some(Bytes::gib(1)) }),
        ("e", Contact { refused: false, error: error("taken"), spare: Some(Bytes::gib(1)) }),
        ("f", Contact { spare: Some(Bytes::mib(3)), ..Contact::default() }),
        ("g", Contact::default()),
    ];
    let said = nobody_lends(Bytes::gib(1), &peers.map(|(host, peer)| (name(host), peer)).into());
    assert_eq!(
        said.error,
        "no host lends 1GiB: b refuses (b: no), c does not answer (timed out), taken, \
         f has 3MiB to spare, g has not answered yet"
    );
    let none = nobody_lends(Bytes::gib(1), &Default::default());
    assert_eq!(none.error, "no host lends 1GiB: this host has no peers");
}

#[test]
fn a_return_of_all_cancels_a_borrowing_that_waits() {
    let mut shell = Shell::new();
    shell.period(20).borrow(1);
    let order = shell.tickets;
    let answers = shell.give_back(None).answers();
    assert_eq!(answers[0], (order + 1, Answer::Returned(Vec::new())));
    assert!(matches!(answers[1], (to, Answer::Failed(_)) if to == order), "{answers:?}");
    assert!(shell.offers(&[("b", 4)]).sent().is_empty(), "the order is forgotten");
}

#[test]
fn a_return_ends_when_the_lenders_have_confirmed() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    assert_eq!(shell.give_back(None).begun(), [Action::Deactivate { volume }]);
    shell.done(Work::Volume(volume), Event::Deactivated { volume });
    assert_eq!(shell.sent(), [("b".to_owned(), bor_fin(LEASE))]);
    assert!(shell.answers().is_empty(), "b does not know yet");
    shell.said("b", bor_fin(LEASE), Said::Taken(None));
    assert_eq!(shell.answer(), Answer::Returned(vec![volume]));
}

#[test]
fn a_return_waits_five_seconds_for_a_silent_lender() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    shell.give_back(Some(volume)).done(Work::Volume(volume), Event::Deactivated { volume });
    for _ in 0..5 {
        assert!(shell.period(20).answers().is_empty());
    }
    assert_eq!(shell.period(20).answer(), Answer::Returned(vec![volume]));
}

#[test]
fn a_return_ordered_twice_runs_once_and_answers_both() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    shell.give_back(None);
    assert!(shell.give_back(Some(volume)).begun().is_empty());
    let second = shell.tickets;
    shell.done(Work::Volume(volume), Event::Deactivated { volume });
    shell.said("b", bor_fin(LEASE), Said::Taken(None));
    let returned = Answer::Returned(vec![volume]);
    assert_eq!(shell.answers(), [(second - 1, returned.clone()), (second, returned)]);
}

#[test]
fn a_return_that_fails_leaves_the_volume_in_use() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    shell.give_back(None);
    let why = "swapoff: no memory".to_owned();
    shell.done(Work::Volume(volume), Event::DeactivationFailed { volume, why });
    assert_eq!(shell.failure(), "swapoff: no memory");
    assert_eq!(shell.node.controller().volumes().len(), 1);
    shell.give_back(Some(VolumeId(77)));
    assert!(shell.failure().starts_with("this host has no volume "));
}

#[test]
fn results_that_come_late_change_nothing() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    shell.hear("b", len_fin(1)).offers(&[]);
    let done = Event::Evacuated { lease: LEASE, unused: Vec::new() };
    shell.done(Work::Lease(LEASE), done.clone()).give_back(None);
    shell.done(Work::Volume(volume), Event::Deactivated { volume });
    shell.said("b", bor_fin(LEASE), Said::Taken(None));
    let why = "late".to_owned();
    for event in [
        Event::Activated { volume },
        Event::ActivationFailed { volume, why: why.clone() },
        Event::Deactivated { volume },
        Event::DeactivationFailed { volume, why: why.clone() },
        done,
        Event::EvacuationFailed { lease: LEASE, unused: Vec::new(), why },
        Event::LeaseOpened { lease: LEASE, uris: Vec::new() },
        Event::LeaseFreed { lease: LEASE },
    ] {
        shell.done(Work::Volume(volume), event.clone());
        assert_eq!((shell.begun(), shell.answers()), (Vec::new(), Vec::new()), "{event:?}");
    }
    shell.said("b", Message::MemLenFin { lease: LEASE, generation: 0 }, Said::Taken(None));
    assert!(shell.outputs.is_empty());
}

#[test]
fn a_volume_leaves_only_if_its_pages_fit_into_memory() {
    let mut shell = Shell::new();
    let volume = shell.swap();
    let swapped = Memory { swap_used: Bytes::gib(2), ..memory(80) };
    let fits = |back, memory: &Memory| shell.node.fits_without(volume, back, memory);
    assert_eq!(fits(Bytes::gib(1), &swapped), Ok(()));
    let error = fits(Bytes::gib(2), &swapped).unwrap_err();
    assert!(error.contains("and does not fit into memory: 2GiB of 10GiB is free"), "{error}");
    assert!(error.starts_with(&format!("2GiB is swapped out to volume {volume}")), "{error}");
    let elsewhere = Memory { swap_used: Bytes::ZERO, ..swapped };
    assert_eq!(fits(Bytes::gib(2), &elsewhere), Ok(()), "other cgroups have their own memory");
}
