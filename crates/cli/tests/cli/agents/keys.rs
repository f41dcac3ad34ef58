//! Tests of keys of leases that the agent replaces while programs use the pages.

use std::collections::BTreeSet;
use std::fs;

use aquifer_api::order::RotatesKeys;
use aquifer_blockdev::process::client as volumes;
use aquifer_page::{Bytes, LeaseId};
use aquifer_region::process::{Files, RegionSpec, client as regions};
use aquifer_volume::LeaseTarget;

use super::copies::{begin, until_whole};
use super::framework::{Answer, Cluster, Host, Spec, lacks_rights, wait_until};
use super::regions::Scene;

/// Returns the record of the region 'items'.
fn record(scene: &Scene) -> RegionSpec {
    let directory = scene.a().state().join("regions");
    regions::record(&Files::new(&directory, &"items".parse().unwrap())).unwrap()
}

fn key(target: &LeaseTarget) -> String {
    target.encryption.as_ref().expect("its pages are encrypted").key.id()
}

/// Returns the keys of a region's leases.
fn keys(scene: &Scene) -> BTreeSet<String> {
    record(scene).leases.iter().map(key).collect()
}

/// Orders a host to replace all keys; returns the leases that it names.
fn rotate(host: &Host) -> Vec<LeaseId> {
    let said: RotatesKeys =
        Answer::of(&mut host.aquifer(&["host", "rotate-keys", "--json"])).json();
    said.leases
}

#[test]
fn old_keys_are_replaced_while_a_program_writes() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").set("borrow", "key_lifetime", "8s");
    let scene = Scene::with(a, &["b", "c"]);
    let file = scene.create("items");
    let mut program = scene.program(&file);
    program.does_in_time("write 1");
    let mut seen = keys(&scene);
    let mut round = 1;
    // The second lease is replaced like the first.
    for count in [2, 3] {
        wait_until("another key is replaced", || {
            round += 1;
            program.does_in_time(&format!("write {round}"));
            program.does_in_time(&format!("check {round}"));
            seen.extend(keys(&scene));
            seen.len() >= count
        });
    }
    program.does_in_time(&format!("check {round}"));
    let why = scene.run(&["why", "items"]).stdout;
    assert!(why.contains("its pages get a new key in place of the present one: it is "), "{why}");
    let status = scene.a().status();
    let ages = status.loans.regions.iter().flat_map(|region| &region.leases);
    assert!(ages.clone().all(|held| held.key_age_s.is_some()), "{ages:?}");
    scene.end(program, &["b", "c"]);
}

#[test]
fn both_copies_of_a_region_get_the_new_key() {
    if lacks_rights() {
        return;
    }
    let (scene, mut program) = begin("mirror", &["b", "c", "d"]);
    let (held, copy) = until_whole(&scene);
    let before = keys(&scene);
    assert_eq!(rotate(scene.a()), [held.lease]);
    let mut round = 1;
    wait_until("other leases hold the pages and their copies", || {
        round += 1;
        program.does_in_time(&format!("write {round}"));
        let spec = record(&scene);
        let mut all = spec.leases.iter().chain(spec.copies.iter().map(|copy| &copy.lease));
        spec.leases.len() == 1
            && spec.copies.len() == 1
            && all.all(|target| ![held.lease, copy.lease].contains(&target.lease))
    });
    let (now, second) = until_whole(&scene);
    assert_ne!(now.lender, second.lender);
    program.does_in_time(&format!("check {round}"));
    let spec = record(&scene);
    let (first, second) = (key(&spec.leases[0]), key(&spec.copies[0].lease));
    assert_eq!(first, second, "one encryption does for both");
    assert!(!before.contains(&first), "the key is new");
    let why = scene.run(&["why", "items"]).stdout;
    assert!(why.contains("the operator ordered it"), "{why}");
    scene.end(program, &["b", "c", "d"]);
}

#[test]
fn the_next_agent_knows_how_old_keys_are() {
    if lacks_rights() {
        return;
    }
    let scene = Scene::with(Spec::new("a"), &["b"]);
    scene.create("items");
    let lease = scene.held().lease;
    let noted = || {
        let text = fs::read_to_string(scene.a().state().join("key-ages.json")).ok()?;
        let ages: serde_json::Value = serde_json::from_str(&text).unwrap();
        ages["ages"].get(lease.to_string())?.as_u64().filter(|age| *age > 0)
    };
    wait_until("the age of the key is noted", || noted().is_some());
    scene.a().kill_agent();
    let age = noted().unwrap();
    scene.a().restart();
    wait_until("the next agent tells the age", || scene.held().key_age_s.is_some());
    assert!(scene.held().key_age_s.unwrap() >= age as f64, "{:?} {age}", scene.held());
    let unknown = Answer::of(&mut scene.a().aquifer(&[
        "host",
        "rotate-keys",
        "--lease",
        &LeaseId(7).to_string(),
    ]));
    assert!(unknown.code == Some(1) && unknown.stderr.contains("holds no lease"), "{unknown:?}");
}

#[test]
fn a_key_is_replaced_under_pages_that_are_swapped_out() {
    if lacks_rights() {
        return;
    }
    let hosts = [Spec::new("a").memory(Bytes::mib(32)), Spec::new("b").memory(Bytes::mib(512))];
    let cluster = Cluster::that_swaps(hosts);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let borrowed = a.borrow(Bytes::mib(128));
    let target = || {
        let record = volumes::record(&a.state(), borrowed.volume).unwrap();
        record.spec.leases
    };
    let leases = target();
    let [before] = &leases[..] else { panic!("{leases:?}") };
    let mut load = a.load(Bytes::mib(64));
    load.filled();
    load.rewrite_during(|| {
        assert_eq!(rotate(a), [before.lease]);
        wait_until("another lease has the pages", || {
            target().iter().all(|now| now.lease != before.lease)
        });
        wait_until("the lender has the former lease back", || b.status().loans.lent.len() == 1);
    });
    let leases = target();
    let [after] = &leases[..] else { panic!("{leases:?}") };
    assert_ne!(key(before), key(after));
    assert_eq!(a.volume().spilled, Bytes::ZERO);
    load.free();
    a.give_back();
    wait_until("both hosts are free", || a.is_free() && b.is_free());
}
