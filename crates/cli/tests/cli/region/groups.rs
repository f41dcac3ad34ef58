//! Tests of a tenant's pages: encrypted at the lender, kept once within the group, and never shared
//! with another group.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use aquifer_hosts::daemon::{EXPORT, SCANNER};
use aquifer_store::Store;
use aquifer_store::tmpfs::stores;
use rustix::process::Signal;
use serde_json::Value;

use super::framework::{Scanner, Setting, kill};
use crate::common::{serve, stderr, wait_until};

/// Bytes of a region that are not zero after `write` (`framework/program.py`).
const NONZERO_BYTES: u64 = (8192 - 8192 / 64) * 4096;

#[test]
fn a_lender_keeps_equal_pages_of_a_group_once_and_can_read_none() {
    let Some(setting) = Setting::new() else { return };
    let path = |name: &str| setting.dir.path().join(name).to_str().unwrap().to_owned();
    let groups = path("groups");
    for group in ["blue", "red"] {
        setting.done(&["group", "create", group, "--groups", &groups]);
    }
    let socket = format!("unix:{}", path("sharing"));
    let words = ["128M", "--nbd", &socket, "--name", "a", "--name", "b", "--name", "c"];
    let mut lender =
        serve(setting.dir.path(), &[&words[..], &["--share", "--report", "50ms"]].concat());
    let pages = lender.pages();
    let mut report = || lender.daemon.report().unwrap();

    let names = ["one", "two", "three"];
    for (at, (name, group)) in names.into_iter().zip(["blue", "blue", "red"]).enumerate() {
        let uri = lender.ready["uris"][at].as_str().unwrap();
        let lent = ["region", "create", name, "--size", "32M", "--cache", "8M", "--lender", uri];
        setting.done(&[&lent[..], &["--group", group, "--groups", &groups]].concat());
        fill_and_persist(&setting, name, 1);
    }
    let counts = |report: &Value| ["stored", "saved"].map(|key| report[key].as_u64().unwrap());
    wait_until("the lender keeps equal pages of a group once", || {
        counts(&report()) == [3 * NONZERO_BYTES, NONZERO_BYTES]
    });
    let now = report();
    assert_eq!(now["shared_frames"].as_u64().unwrap() * 4096, NONZERO_BYTES, "{now}");
    assert!(now["taken"].as_u64().unwrap() < 2 * NONZERO_BYTES + (8 << 20), "{now}");
    assert!(holds_no_plaintext(&pages));

    // A write to one region must not change the other.
    fill_and_persist(&setting, "two", 2);
    wait_until("writes have unshared the pages", || counts(&report()) == [3 * NONZERO_BYTES, 0]);
    assert_eq!(report()["breaks"].as_u64().unwrap() * 4096, NONZERO_BYTES);
    for (name, seed) in names.into_iter().zip([1, 2, 1]) {
        let region = setting.dir.path().join("regions").join(name);
        setting.start(&region).does(&format!("check {seed}"));
    }

    assert_eq!(setting.show("one")["volume"]["leases"][0]["encryption"], "deterministic");
    // No command shows the key of a group or of a lease.
    let agreement = fs::read_to_string(setting.dir.path().join("groups/blue.toml")).unwrap();
    let key =
        agreement.lines().find_map(|line| line.strip_prefix("key = ")).unwrap().trim_matches('"');
    for words in
        [&["region", "list"][..], &["region", "show", "one"], &["region", "show-pages", "one"]]
    {
        assert!(!setting.done(words).to_string().contains(&key[..16]), "{words:?}");
    }
    let kept = setting.aquifer(&["group", "rm", "blue", "--groups", &groups]);
    assert!(stderr(&kept).contains("it has regions here: one, two"), "{}", stderr(&kept));
    for name in names {
        setting.remove(name);
    }
    setting.done(&["group", "rm", "blue", "--groups", &groups]);
    assert_eq!(lender.end(Signal::TERM).unwrap(), Some(0));
}

#[test]
fn a_killed_lender_has_all_shared_pages_when_it_is_back() {
    let Some(setting) = Setting::new() else { return };
    let groups = setting.dir.path().join("groups").to_str().unwrap().to_owned();
    setting.done(&["group", "create", "blue", "--groups", &groups]);
    let pages = tempfile::tempdir_in(stores().unwrap()).unwrap();
    let socket = format!("unix:{}", setting.dir.path().join("sharing").display());
    let words = ["128M", "--nbd", &socket, "--name", "a", "--name", "b", "--share"];
    let words = [&words[..], &["--dir", pages.path().to_str().unwrap()]].concat();
    let mut lender = serve(setting.dir.path(), &words);
    let mut programs = Vec::new();
    for (at, name) in ["one", "two"].into_iter().enumerate() {
        let uri = lender.ready["uris"][at].as_str().unwrap();
        let lent = ["region", "create", name, "--size", "32M", "--cache", "8M", "--lender", uri];
        setting.done(&[&lent[..], &["--group", "blue", "--groups", &groups]].concat());
        programs.push(setting.start(&setting.dir.path().join("regions").join(name)));
        programs.last_mut().unwrap().does("write 1");
    }
    for seed in [2, 1, 3, 1] {
        // One program writes while the other reads.
        programs[0].order("check 1");
        programs[1].order(&format!("write {seed}"));
        sleep(Duration::from_millis(100));
        lender.end(Signal::KILL).unwrap();
        let store = Store::open(pages.path()).unwrap();
        store.audit().unwrap();
        assert!(store.findings().is_empty() && store.leases().len() == 2, "{:?}", store.findings());
        drop(store);
        lender = serve(setting.dir.path(), &words);
        assert_eq!(programs[0].answer(), "check 0");
        assert_eq!(programs[1].answer(), "write 0");
        programs[1].does(&format!("check {seed}"));
    }
    for name in ["one", "two"] {
        setting.done(&["region", "persist", name]);
    }
    lender.end(Signal::KILL).unwrap();
    let store = Store::open(pages.path()).unwrap();
    store.audit().unwrap();
    let shared = store.usage().groups[&"default".parse().unwrap()].shared;
    assert_eq!(
        (shared.stored.0, shared.saved.0, shared.shared_frames),
        (2 * NONZERO_BYTES, NONZERO_BYTES, NONZERO_BYTES / 4096)
    );
    drop(store);
    // The store refuses an export with other parameters, and its pages stay.
    let other = setting.aquifer(&[EXPORT, &["128M"], &words[8..]].concat());
    assert!(
        stderr(&other).contains("leases of an agent, or of an export with another name"),
        "{}",
        stderr(&other)
    );
    lender = serve(setting.dir.path(), &words);
    programs.iter_mut().for_each(|program| program.does("check 1"));
    drop(programs);
    ["one", "two"].iter().for_each(|name| setting.remove(name));
    assert_eq!(lender.end(Signal::TERM).unwrap(), Some(0));
    assert_eq!(
        fs::read_dir(pages.path())
            .unwrap()
            .filter(|file| file.as_ref().unwrap().file_name() != "lock")
            .count(),
        0
    );
}

#[test]
fn equal_pages_are_kept_once_in_a_group_and_not_across_groups() {
    let Some(setting) = Setting::new() else { return };
    let groups = setting.dir.path().join("groups").to_str().unwrap().to_owned();
    for group in ["blue", "red"] {
        setting.done(&["group", "create", group, "--groups", &groups]);
    }
    let local = ["--size", "32M", "--cache", "64M", "--emulate-link", "1us", "--groups", &groups];
    let mut programs = Vec::new();
    for (name, group) in [("one", "blue"), ("two", "blue"), ("three", "red")] {
        setting.done(&[&["region", "create", name, "--group", group][..], &local].concat());
        programs.push(setting.start(&setting.dir.path().join("regions").join(name)));
        programs.last_mut().unwrap().does("write 1");
    }
    let number = |report: &Value, key: &str| report[key].as_u64().unwrap();
    let resident = |name: &str| setting.show(name)["usage"]["resident"].as_u64().unwrap();
    let mut red = Scanner::start(&setting, "red", &groups);
    let mut blue = Scanner::start(&setting, "blue", &groups);
    let all = blue.until("all equal pages are shared", |report| {
        number(report, "saved_bytes") == NONZERO_BYTES
    });
    assert_eq!(
        [number(&all, "shared_bytes"), number(&all, "frames_bytes")],
        [2 * NONZERO_BYTES, NONZERO_BYTES],
        "{all}"
    );
    // Both regions have the same layout, and the frames have it, too.
    assert!(all["mappings_per_page"].as_f64().unwrap() < 0.2, "{all}");
    assert_eq!([resident("one"), resident("two")], [0, 0]);
    let none = red.until("the scanner makes three passes", |report| number(report, "passes") >= 3);
    assert_eq!(number(&none, "shared_bytes"), 0, "{none}");
    for program in &mut programs {
        program.does("check 1");
    }

    // A killed engine or scanner loses nothing, and neither does a write to shared pages.
    blue.end(Signal::KILL);
    kill(&setting.show("two")["pid"]);
    programs[1].does("check 1");
    programs[1].does("write 2");
    programs[0].does("check 1");
    programs[1].does("check 2");
    let shown = setting.done(&["group", "show", "blue", "--groups", &groups]);
    assert_eq!(number(&shown["sharing"], "shared_bytes"), NONZERO_BYTES, "{shown}");
    let mut blue = Scanner::start(&setting, "blue", &groups);
    programs[1].does("write 1");
    blue.until("the equal pages are shared again", |report| {
        number(report, "saved_bytes") == NONZERO_BYTES
    });
    // Pages change during the scan.
    for seed in [3, 1, 4] {
        programs[1].does(&format!("write {seed}"));
        programs[0].does("write 3");
        programs[1].does(&format!("check {seed}"));
        programs[0].does("check 3");
    }
    programs[1].does("punch 100 50");
    programs[1].does("zero 100 50");
    blue.end(Signal::TERM);
    red.end(Signal::INT);
    setting.done(&[SCANNER, &["blue", "--undo", "--groups", &groups]].concat());
    let shown = setting.done(&["group", "show", "blue", "--groups", &groups]);
    assert_eq!(number(&shown["sharing"], "shared_bytes"), 0, "{shown}");
    programs[0].does("check 3");
    drop(programs);
    for name in ["one", "two", "three"] {
        setting.remove(name);
    }
    assert_eq!(setting.mounts(), 0);
}

/// Fills a region by a program, and writes all of it to the lender.
fn fill_and_persist(setting: &Setting, name: &str, seed: u32) {
    let region = setting.dir.path().join("regions").join(name);
    let mut program = setting.start(&region);
    program.does(&format!("write {seed}"));
    drop(program);
    wait_until("no program maps the region", || {
        setting.show(name)["programs"].as_array().unwrap().is_empty()
    });
    setting.done(&["region", "persist", name]);
}

/// Returns whether a lender's files have none of the programs' content.
fn holds_no_plaintext(dir: &Path) -> bool {
    let words = [b"00000001 00".as_slice(), b"00000002 00"];
    fs::read_dir(dir).unwrap().all(|file| {
        let content = fs::read(file.unwrap().path()).unwrap();
        content.chunks(4096).all(|page| !words.iter().any(|word| page.starts_with(word)))
    })
}
