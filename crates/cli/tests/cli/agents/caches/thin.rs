//! Tests of regions that borrow for the pages that leave, and not for all of themselves.

use std::thread;
use std::time::Duration;

use rustix::process::kill_process;

use super::*;

/// A region far larger than the two lenders together can spare.
const SIZE: Bytes = Bytes::mib(256);

fn granted(scene: &Scene) -> Bytes {
    let lent = ["b", "c"].map(|name| scene.cluster[name].status().loans.lent);
    lent.iter().flatten().map(|lent| lent.capacity).sum()
}

/// Sets a region on a host that two small ones can help, and overloads the host.
fn overloaded() -> (Scene, Load) {
    let lenders = ["b", "c"].map(|name| Spec::new(name).memory(Bytes::mib(96)));
    let scene = Scene::with(SIZE, Bytes::mib(416), lenders.into_iter());
    let load = scene.overload(Bytes::mib(80), &["b", "c"]);
    (scene, load)
}

#[test]
fn small_lenders_relieve_a_large_region() {
    if lacks_rights() {
        return;
    }
    let (mut scene, mut load) = overloaded();
    scene.does("check 1");
    scene.does("write 2");
    scene.does("check 2");
    let (granted, cache) = (granted(&scene), scene.cache());
    assert!(granted < SIZE, "{granted}");
    assert!(cache.0 + granted.0 / 2 >= SIZE.0, "{cache} {granted}");
    assert!(!scene.a().has_volumes(), "the host does not swap");
    // The operator may choose only what the leases allow.
    let refused = scene.resize("64M");
    assert_ne!(refused.code, Some(0), "{refused:?}");
    scene.does("check 2");
    load.verify();
    scene.end(&["b", "c"]);
}

#[test]
fn deaths_of_agent_and_engine_lose_nothing_of_a_thin_region() {
    if lacks_rights() {
        return;
    }
    let (mut scene, mut load) = overloaded();
    scene.does("write 2");
    scene.a().kill_agent();
    scene.kill_engine();
    scene.does("check 2");
    scene.a().start();
    scene.a().wait_until_ready();
    scene.does("write 3");
    scene.does("check 3");
    load.verify();
    scene.end(&["b", "c"]);
}

#[test]
fn a_thin_region_waits_for_a_lender_that_hangs() {
    if lacks_rights() {
        return;
    }
    let (mut scene, mut load) = overloaded();
    for version in 2..=4 {
        for lender in ["b", "c"] {
            // Its answers come late, some after the region has given up and connected again.
            scene.cluster[lender].signal(Signal::STOP).unwrap();
            let pid = scene.cluster[lender].pid().unwrap();
            let hangs = thread::spawn(move || {
                thread::sleep(Duration::from_millis(1500));
                kill_process(pid, Signal::CONT).unwrap();
            });
            scene.does(&format!("check {}", version - 1));
            hangs.join().unwrap();
        }
        scene.does(&format!("write {version}"));
    }
    scene.does("check 4");
    load.verify();
    scene.end(&["b", "c"]);
}

#[test]
fn a_lender_of_a_thin_region_drains() {
    if lacks_rights() {
        return;
    }
    let (mut scene, mut load) = overloaded();
    load.verify();
    drop(load);
    // Without the load, the host has room for the pages of one lender, or the other lender has.
    let lender = if scene.cluster["b"].stored() > Bytes::ZERO { "b" } else { "c" };
    let drained = Answer::of(&mut scene.cluster[lender].aquifer(&["host", "drain"]));
    assert_eq!(drained.code, Some(0), "{drained:?}");
    assert!(scene.cluster[lender].is_free());
    scene.does("check 1");
    scene.does("write 2");
    scene.does("check 2");
    scene.end(&["b", "c"]);
}
