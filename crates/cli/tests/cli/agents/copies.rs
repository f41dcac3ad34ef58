//! Tests of regions of which the agents keep two copies at lenders.

use std::fs;

use aquifer_api::status::{EventKind, Held, SecondCopy};
use aquifer_page::Bytes;

use super::framework::{Answer, Spec, lacks_rights, wait_until};
use super::regions::Scene;
use crate::common::Export;
use crate::region::framework::Program;

/// A host `a` whose agent keeps two copies, and the program of its region.
fn with_copies(lenders: &[&'static str]) -> (Scene, Program) {
    with_copies_of("mirror", lenders)
}

fn with_copies_of(protection: &str, lenders: &[&'static str]) -> (Scene, Program) {
    let begun = begin(protection, lenders);
    until_whole(&begun.0);
    begun
}

/// A host `a` whose agent protects its regions, and a program that has written to one.
pub(super) fn begin(protection: &str, lenders: &[&'static str]) -> (Scene, Program) {
    begin_as(Spec::new("a").set("borrow", "protection", protection), lenders)
}

fn begin_as(a: Spec, lenders: &[&'static str]) -> (Scene, Program) {
    let a = a.set("borrow", "io_timeout", "4s");
    let scene = Scene::with(a, lenders);
    let file = scene.create("items");
    let mut program = scene.program(&file);
    program.does_in_time("write 1");
    (scene, program)
}

/// Returns the lease of the region, if both copies are whole.
fn whole(scene: &Scene) -> Option<(Held, SecondCopy)> {
    let regions = scene.a().status().loans.regions;
    let [region] = &regions[..] else { panic!("{regions:?}") };
    let [held] = &region.leases[..] else { return None };
    let copy = held.copy.clone()?;
    let is_whole = copy.first_answers
        && copy.answers
        && copy.lacks.saturating_add(copy.first_lacks) == Bytes::ZERO;
    is_whole.then(|| (held.clone(), copy))
}

pub(super) fn until_whole(scene: &Scene) -> (Held, SecondCopy) {
    wait_until("both copies are whole", || whole(scene).is_some());
    whole(scene).expect("it was whole")
}

fn kill_engine(scene: &Scene) {
    let engine = scene.done(&["region", "show", "items"])["pid"].as_i64().expect("a pid");
    let engine = rustix::process::Pid::from_raw(engine as i32).expect("a pid");
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).expect("it runs");
}

#[test]
fn two_lenders_die_in_turn_and_no_page_is_lost() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies(&["b", "c", "d"]);
    let (held, copy) = until_whole(&scene);
    assert_ne!(held.lender, copy.lender);
    let status = scene.run(&["status"]).stdout;
    assert!(status.contains(&format!("copy at {}", copy.lender)), "{status}");
    let why = scene.run(&["why", "items"]).stdout;
    assert!(why.contains("keeps second copies of the pages in lease"), "{why}");

    // The lender of the first copies dies for good, under the program's writes.
    program.order("write 2");
    scene.0[held.lender.as_str()].kill_agent();
    assert_eq!(program.answers_in_time(), "write 0");
    program.does_in_time("check 2");
    wait_until("the pages are at two living lenders", || {
        whole(&scene)
            .is_some_and(|(now, second)| now.lender != held.lender && second.lender != held.lender)
    });
    program.does_in_time("check 2");

    // Then the lender of the second ones.
    let (held, copy) = until_whole(&scene);
    program.order("write 3");
    scene.0[copy.lender.as_str()].kill_agent();
    assert_eq!(program.answers_in_time(), "write 0");
    program.does_in_time("check 3");
    program.does_in_time("write 4");
    program.does_in_time("check 4");
    let still = scene.held().lender;
    assert_eq!(still, held.lender);
    let events = scene.a().status().history.events;
    let is_lost = events.iter().any(|event| event.kind == EventKind::LeaseLost);
    assert!(!is_lost, "{events:?}");
    drop(program);
}

#[test]
fn a_lender_that_drains_gives_its_copies_up_at_once() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies(&["b", "c", "d"]);
    let (held, copy) = until_whole(&scene);
    program.order("write 2");
    let drained =
        Answer::of(&mut scene.0[copy.lender.as_str()].aquifer(&["host", "drain", "--json"]));
    assert_eq!(drained.code, Some(0), "{drained:?}");
    assert_eq!(program.answers_in_time(), "write 0");
    assert!(scene.0[copy.lender.as_str()].lease_files().is_empty());
    program.does_in_time("check 2");
    wait_until("a third host has the copy", || {
        whole(&scene).is_some_and(|(first, second)| {
            first.lender == held.lender && second.lender != copy.lender
        })
    });
    program.does_in_time("check 2");
    scene.end(program, &["b", "c", "d"]);
}

#[test]
fn the_next_agent_and_engine_find_the_copies() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies(&["b", "c"]);
    let (held, copy) = until_whole(&scene);
    scene.a().kill_agent();
    program.does_in_time("write 2");
    scene.a().restart();
    let (now, second) = until_whole(&scene);
    assert_eq!((now.lease, second.lease), (held.lease, copy.lease));
    kill_engine(&scene);
    program.does_in_time("check 2");
    let (now, second) = until_whole(&scene);
    assert_eq!((now.lease, second.lease), (held.lease, copy.lease));
    // The copy has all pages: the first lender may go.
    scene.0[held.lender.as_str()].kill_agent();
    program.does_in_time("check 2");
    scene.0[held.lender.as_str()].restart();
    until_whole(&scene);
    scene.end(program, &["b", "c"]);
}

/// An engine that is killed while it ends a copy leaves the copy in the record, without tags.
#[test]
fn a_copy_without_tags_is_replaced() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies(&["b", "c", "d"]);
    let (held, copy) = until_whole(&scene);
    scene.a().kill_agent();
    kill_engine(&scene);
    let tags = format!("regions/.items/tags-{}", copy.lease);
    fs::remove_file(scene.a().state().join(tags)).expect("the copy has tags");
    scene.a().restart();
    program.does_in_time("write 2");
    wait_until("another lease has the copy", || {
        whole(&scene).is_some_and(|(now, second)| {
            (now.lease, second.lease) != (held.lease, copy.lease) && now.lease == held.lease
        })
    });
    let lender = &scene.0[copy.lender.as_str()];
    let (_, second) = until_whole(&scene);
    wait_until("the former lease is back", || {
        lender.status().loans.lent.iter().all(|lent| lent.lease != copy.lease)
    });
    scene.0[held.lender.as_str()].kill_agent();
    program.does_in_time("check 2");
    assert_ne!(second.lease, copy.lease);
    scene.0[held.lender.as_str()].restart();
    until_whole(&scene);
    scene.end(program, &["b", "c", "d"]);
}

#[test]
fn without_a_word_copies_are_kept_where_nobody_needs_memory() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").unset("borrow", "protection");
    let (scene, mut program) = begin_as(a, &["b", "c"]);
    let (held, copy) = until_whole(&scene);
    let mirror = |host: &str| scene.0[host].status().ledger.mirror;
    assert_eq!(mirror(copy.lender.as_str()), held.capacity);
    scene.0[held.lender.as_str()].kill_agent();
    program.does_in_time("check 1");
    program.does_in_time("write 2");
    program.does_in_time("check 2");
    scene.0[held.lender.as_str()].restart();
    scene.end(program, &["b", "c"]);
}

#[test]
fn opportunistic_copies_make_room_for_the_lenders_own() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies_of("opportunistic", &["b", "c"]);
    let (held, copy) = until_whole(&scene);
    assert!(copy.in_ring.is_some(), "it lags behind: {copy:?}");
    let lender = &scene.0[copy.lender.as_str()];
    let ledger = || lender.status().ledger;
    let before = ledger();
    assert_eq!((before.mirror, before.lent), (held.capacity, Bytes::ZERO), "{before:?}");
    assert_eq!(scene.0[held.lender.as_str()].status().ledger.mirror, Bytes::ZERO);
    let shown = Answer::of(&mut lender.aquifer(&["status"])).stdout;
    assert!(shown.contains("items (mirror)"), "{shown}");

    // An export by hand gets all that is free, and half of what the copy has.
    let size = format!("{}M", (before.free + before.mirror.scaled(0.5)).0 >> 20);
    let words = ["--json", "serve", "export", "--size", &size, "--nbd", "127.0.0.1:0"];
    program.order("write 2");
    let export = Export::start(&mut lender.inside(&words)).expect("it may take the memory");
    wait_until("the copy is gone", || lender.lease_files().is_empty());
    assert_eq!(program.answers_in_time(), "write 0");
    let why = Answer::of(&mut lender.aquifer(&["why", &copy.lease.to_string()])).stdout;
    assert!(why.contains("others need the memory, and second copies go first"), "{why}");
    program.does_in_time("check 2");
    assert_eq!(scene.held().lease, held.lease);
    drop(export);
    scene.end(program, &["b", "c"]);
}
