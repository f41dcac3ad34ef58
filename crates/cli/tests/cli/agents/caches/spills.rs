//! Tests of regions whose lender wants its memory back while nobody has room for the pages.

use std::fs;

use aquifer_api::status::EventKind;

use super::*;

fn spill_files(scene: &Scene) -> usize {
    fs::read_dir(scene.a().spill()).map_or(0, Iterator::count)
}

fn spilled(scene: &Scene) -> Bytes {
    scene.a().status().loans.regions.iter().map(|region| region.spilled).sum()
}

fn order(scene: &Scene, words: &[&str]) {
    let done = Answer::of(&mut scene.cluster["b"].aquifer(&[&["host"], words].concat()));
    assert_eq!(done.code, Some(0), "{done:?}");
}

/// Gives `items` a cache of 32 MiB that the agent may not grow, and drains its only lender.
fn with_spilled_pages() -> Scene {
    let mut scene = Scene::set(&["b"]);
    assert_eq!(scene.resize("32M").code, Some(0));
    scene.does("write 2");
    assert_eq!(spill_files(&scene), 0);
    order(&scene, &["drain"]);
    assert!(scene.cluster["b"].is_free());
    assert_eq!(spill_files(&scene), 1);
    scene
}

#[test]
fn a_lender_drains_though_no_other_host_has_room() {
    if lacks_rights() {
        return;
    }
    let mut scene = with_spilled_pages();
    scene.does("check 2");
    scene.does("write 3");
    // They are on the disk for good, until the lender is back.
    scene.a().kill_agent();
    scene.kill_engine();
    scene.does("check 3");
    scene.a().start();
    scene.a().wait_until_ready();
    wait_until("the next agent knows of the pages", || spilled(&scene) > Bytes::ZERO);
    let status = Answer::of(&mut scene.a().aquifer(&["status"])).stdout;
    assert!(status.contains("in the local spill file"), "{status}");

    order(&scene, &["undrain"]);
    wait_until("the pages are at the lender again", || {
        spilled(&scene) == Bytes::ZERO && scene.cluster["b"].stored() >= Bytes::mib(48)
    });
    scene.does("check 3");
    let kinds: Vec<_> = scene.a().status().history.events.iter().map(|event| event.kind).collect();
    assert!(
        kinds.contains(&EventKind::Spill) && kinds.contains(&EventKind::SpillBack),
        "{kinds:?}"
    );
    let why = scene.why();
    assert!(why.contains("which are in its spill file"), "{why}");
    scene.end(&["b"]);
    assert_eq!(spill_files(&scene), 0, "the file goes with the region");
}

#[test]
fn an_overloaded_host_takes_pages_to_its_disk_at_last() {
    if lacks_rights() {
        return;
    }
    let mut scene = Scene::set(&["b"]);
    let mut load = scene.overload(Bytes::mib(160), &["b"]);
    order(&scene, &["drain"]);
    assert!(scene.cluster["b"].is_free());
    assert_eq!(spill_files(&scene), 1);
    scene.does("check 1");
    scene.does("write 2");
    load.verify();
    scene.does("check 2");
    scene.end(&["b"]);
}
