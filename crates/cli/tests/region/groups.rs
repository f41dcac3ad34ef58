//! A tenant's pages with a lender: sealed, kept once within its group, and never with another's.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::common::{Export, eventually, stderr};
use crate::framework::Setting;

/// Pages of a region that are not zero, as the program writes it (`framework/program.py`).
const FULL: u64 = (8192 - 8192 / 64) * 4096;

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
        Export::start(setting.dir.path(), &[&words[..], &["--share", "--report", "50ms"]].concat());
    let mut reports = BufReader::new(lender.child.stdout.take().unwrap()).lines();
    // Whoever began to read them has taken a part of a line, maybe.
    let mut report =
        || -> Value { reports.by_ref().find_map(|line| serde_json::from_str(&line.unwrap()).ok()).unwrap() };

    let names = ["one", "two", "three"];
    for (at, (name, group)) in names.into_iter().zip(["blue", "blue", "red"]).enumerate() {
        let uri = lender.ready["uris"][at].as_str().unwrap();
        let lent = ["region", "create", name, "--size", "32M", "--cache", "8M", "--lender", uri];
        setting.done(&[&lent[..], &["--group", group, "--groups", &groups]].concat());
        writes(&setting, name, 1);
    }
    let counts = |report: &Value| ["stored", "saved"].map(|key| report[key].as_u64().unwrap());
    eventually("equal pages of one group are kept once", || counts(&report()) == [3 * FULL, FULL]);
    let now = report();
    assert_eq!(now["shared_frames"].as_u64().unwrap() * 4096, FULL, "{now}");
    assert!(now["taken"].as_u64().unwrap() < 2 * FULL + (8 << 20), "{now}");
    assert!(sees_nothing(&lender.pages()));

    // One of them writes: the other one's stay.
    writes(&setting, "two", 2);
    eventually("what is written is parted again", || counts(&report()) == [3 * FULL, 0]);
    assert_eq!(report()["breaks"].as_u64().unwrap() * 4096, FULL);
    for (name, seed) in names.into_iter().zip([1, 2, 1]) {
        let region = setting.dir.path().join("regions").join(name);
        setting.start(&region).does(&format!("check {seed}"));
    }

    assert_eq!(setting.show("one")["volume"]["leases"][0]["sealed"], "deterministic");
    // No key is shown, of a group or of a lease.
    let agreement = fs::read_to_string(setting.dir.path().join("groups/blue.toml")).unwrap();
    let key = agreement.lines().find_map(|line| line.strip_prefix("key = ")).unwrap().trim_matches('"');
    for words in [&["region", "list"][..], &["region", "show", "one"], &["region", "pages", "one"]] {
        assert!(!setting.done(words).to_string().contains(&key[..16]), "{words:?}");
    }
    let kept = setting.aquifer(&["group", "rm", "blue", "--groups", &groups]);
    assert!(stderr(&kept).contains("there are regions in it: one, two"), "{}", stderr(&kept));
    for name in names {
        setting.remove(name);
    }
    setting.done(&["group", "rm", "blue", "--groups", &groups]);
    assert_eq!(lender.end(Signal::TERM), Some(0));
}

/// Has a program fill a region, and its lender have all of it.
fn writes(setting: &Setting, name: &str, seed: u32) {
    let region = setting.dir.path().join("regions").join(name);
    let mut program = setting.start(&region);
    program.does(&format!("write {seed}"));
    drop(program);
    eventually("nobody maps it", || setting.show(name)["programs"].as_array().unwrap().is_empty());
    setting.done(&["region", "persist", name]);
}

/// Whether nothing of what programs write is in a lender's files.
fn sees_nothing(dir: &Path) -> bool {
    let words = [b"00000001 00".as_slice(), b"00000002 00"];
    fs::read_dir(dir).unwrap().all(|file| {
        let content = fs::read(file.unwrap().path()).unwrap();
        content.chunks(4096).all(|page| !words.iter().any(|word| page.starts_with(word)))
    })
}
