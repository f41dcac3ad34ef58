//! Tests of regions of which the agent keeps a copy on the host's disk.

use std::fs;

use aquifer_api::status::{DiskCopy, EventKind, Held};
use aquifer_page::Bytes;

use super::copies::begin;
use super::framework::{lacks_rights, wait_until};
use super::regions::Scene;
use crate::region::framework::Program;

/// A host `a` whose agent keeps copies on the disk, and the program of its region.
fn with_copies(lenders: &[&'static str]) -> (Scene, Program) {
    let begun = begin("disk", lenders);
    until_whole(&begun.0);
    begun
}

/// Returns the lease of the region, if its lender and the disk have all pages.
fn whole(scene: &Scene) -> Option<(Held, DiskCopy)> {
    let regions = scene.a().status().loans.regions;
    let [region] = &regions[..] else { panic!("{regions:?}") };
    let [held] = &region.leases[..] else { return None };
    let copy = held.disk.clone()?;
    let missing = copy.lacks.saturating_add(copy.lender_lacks).saturating_add(copy.in_ring);
    (copy.lender_answers && missing == Bytes::ZERO).then(|| (held.clone(), copy))
}

fn until_whole(scene: &Scene) -> (Held, DiskCopy) {
    wait_until("the lender and the disk have all pages", || whole(scene).is_some());
    whole(scene).expect("it was whole")
}

fn files(scene: &Scene) -> usize {
    fs::read_dir(scene.a().spill()).map_or(0, Iterator::count)
}

#[test]
fn a_lender_dies_and_its_pages_move_from_the_disk_to_another() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies(&["b", "c"]);
    let (held, copy) = until_whole(&scene);
    assert!(copy.held > Bytes::ZERO, "{copy:?}");
    assert!(scene.a().status().loans.at_risk.iter().all(|risk| risk.bytes == Bytes::ZERO));
    let status = scene.run(&["status"]).stdout;
    assert!(status.contains("on the disk"), "{status}");
    assert_eq!(files(&scene), 1);

    // The lender dies for good, under the program's writes.
    program.order("write 2");
    scene.0[held.lender.as_str()].kill_agent();
    assert_eq!(program.answers_in_time(), "write 0");
    program.does_in_time("check 2");
    wait_until("the pages are at the living lender", || {
        whole(&scene).is_some_and(|(now, _)| now.lender != held.lender)
    });
    program.does_in_time("check 2");
    let events = scene.a().status().history.events;
    let is_lost = events.iter().any(|event| event.kind == EventKind::LeaseLost);
    assert!(!is_lost, "{events:?}");
    assert_eq!(files(&scene), 1);
    drop(program);
}

#[test]
fn the_next_agent_and_engine_find_the_copies_on_the_disk() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = with_copies(&["b"]);
    let (held, _) = until_whole(&scene);
    scene.a().kill_agent();
    program.does_in_time("write 2");
    scene.a().restart();
    let engine = scene.done(&["region", "show", "items"])["pid"].as_i64().expect("a pid");
    let engine = rustix::process::Pid::from_raw(engine as i32).expect("a pid");
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).expect("it runs");
    program.does_in_time("check 2");
    assert_eq!(until_whole(&scene).0.lease, held.lease);
    // The disk has all pages: the lender may go.
    scene.0["b"].kill_agent();
    program.does_in_time("check 2");
    scene.0["b"].restart();
    until_whole(&scene);
    scene.end(program, &["b"]);
    assert_eq!(files(&scene), 0);
}
