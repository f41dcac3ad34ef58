//! Tests of two groups with the same secret pages: they share nothing, and neither can detect the
//! other's pages.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, VolumeId, WorkerId};
use aquifer_volume::{Encryption, EncryptionMode, LeaseTarget, Protocol, Volume, VolumeConfig};
use rustix::process::Signal;
use serde_json::Value;

use super::framework::{GUESSING_PROGRAM, Program, Scanner, Setting};
use crate::common::{Export, serve, wait_until};
use crate::rank::{CHANCE, at_best, auc, by_chance};

const WORKER: WorkerId = WorkerId(0);
const PAGE_BYTES: u64 = 4096;
/// Pages of each of the three kinds.
const PAGES_PER_KIND: u64 = 2048;

struct Tenants {
    setting: Setting,
    groups: String,
}

impl Tenants {
    fn new() -> Option<Self> {
        let setting = Setting::new()?;
        let groups = setting.dir.path().join("groups").to_str().unwrap().to_owned();
        for group in ["blue", "red"] {
            setting.done(&["group", "create", group, "--groups", &groups]);
        }
        Some(Self { setting, groups })
    }

    /// Starts a program with a region of a group.
    fn program(&self, name: &str, group: &str, way: &[&str]) -> Program {
        let words = ["region", "create", name, "--size", "24M", "--cache", "32M", "--group", group];
        let made = self.setting.done(&[&words[..], &["--groups", &self.groups], way].concat());
        self.setting.exec(&[
            "--",
            "python3",
            "-c",
            GUESSING_PROGRAM,
            made["file"].as_str().unwrap(),
        ])
    }

    fn local(&self, name: &str, group: &str) -> Program {
        self.program(name, group, &["--emulate-link", "1us"])
    }

    /// Returns the inode of a group's frames, and how many pages of them this program has mapped.
    fn mapped(&self, group: &str, program: &Program) -> (u64, u64) {
        let frames = self.setting.dir.path().join(format!("regions/@{group}/frames"));
        let inode = fs::metadata(frames).unwrap().ino();
        let maps = fs::read_to_string(format!("/proc/{}/maps", program.child.id())).unwrap();
        let length = |line: &str| {
            let mut words = line.split_whitespace();
            let (first, end) = words.next()?.split_once('-')?;
            let is_it = words.nth(3)?.parse() == Ok(inode);
            is_it.then(|| {
                u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(first, 16).unwrap()
            })
        };
        (inode, maps.lines().filter_map(length).sum::<u64>() / PAGE_BYTES)
    }
}

fn number(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap()
}

/// Waits until a group saves so many pages, and for three more passes, which must save no more.
fn until_saved(scanner: &mut Scanner, pages: u64) {
    let saved = scanner.until("equal pages are shared", |report| {
        number(report, "saved_bytes") == pages * PAGE_BYTES
    });
    let passes = number(&saved, "passes") + 3;
    let is_later = |report: &Value| number(report, "passes") >= passes;
    let then = scanner.until("the scanner has made three more passes", is_later);
    assert_eq!(number(&then, "saved_bytes"), pages * PAGE_BYTES, "{then}");
}

#[test]
fn two_groups_each_keep_their_common_pages_once() {
    let Some(tenants) = Tenants::new() else { return };
    let names = [("one", "blue"), ("two", "blue"), ("three", "red"), ("four", "red")];
    let mut programs = names.map(|(name, group)| tenants.local(name, group));
    programs.iter_mut().for_each(|program| program.does("fill 1 2 3"));
    let mut scanners =
        ["blue", "red"].map(|group| Scanner::start(&tenants.setting, group, &tenants.groups));
    for scanner in &mut scanners {
        until_saved(scanner, 3 * PAGES_PER_KIND);
    }
    for (program, (name, own)) in programs.iter_mut().zip(names) {
        let other = if own == "blue" { "red" } else { "blue" };
        let (own, other) = (tenants.mapped(own, program), tenants.mapped(other, program));
        assert!(
            own.0 != other.0 && own.1 == 3 * PAGES_PER_KIND && other.1 == 0,
            "{name}: {own:?} {other:?}"
        );
        program.does("check 1 2 3");
    }
    // One group overwrites all its pages: the other group's stay.
    programs[0].does("fill 4 5 6");
    programs[1].does("fill 4 5 6");
    for (program, seeds) in programs.iter_mut().zip(["4 5 6", "4 5 6", "1 2 3", "1 2 3"]) {
        program.does(&format!("check {seeds}"));
    }
}

#[test]
fn write_times_reveal_pages_of_the_own_group_only() {
    let Some(tenants) = Tenants::new() else { return };
    // The attacker's first pages equal the victim's, the second no others, the third those of
    // `mate` in the attacker's own group.
    let seeds = [
        ("victim", "blue", "1 7 8"),
        ("twin", "blue", "1 9 10"),
        ("mate", "red", "11 12 3"),
        ("attacker", "red", "1 2 3"),
    ];
    let mut programs = seeds.map(|(name, group, _)| tenants.local(name, group));
    let mut scanners =
        ["blue", "red"].map(|group| Scanner::start(&tenants.setting, group, &tenants.groups));
    let measured = |_| {
        for (program, (_, _, seeds)) in programs.iter_mut().zip(seeds) {
            program.does(&format!("fill {seeds}"));
        }
        scanners.iter_mut().for_each(|scanner| until_saved(scanner, PAGES_PER_KIND));
        programs[3].order("guess");
        let [other, nobody, own]: [Vec<u64>; 3] =
            serde_json::from_str(&programs[3].answer()).unwrap();
        for (program, (_, _, seeds)) in programs.iter_mut().zip(seeds).take(3) {
            program.does(&format!("check {seeds}"));
        }
        (auc(&other, &nobody), auc(&own, &nobody))
    };
    at_best(measured, |(other, own)| (other - 0.5).abs() < CHANCE && *own > 0.9);
}

/// Starts a lender that shares pages, with a device for each name.
fn sharing_lender(setting: &Setting, names: &[&str]) -> Export {
    let socket = format!("unix:{}", setting.dir.path().join("sharing").display());
    let names = names.iter().flat_map(|name| ["--name", *name]);
    let words: Vec<&str> =
        ["64M", "--nbd", &socket, "--share", "--report", "50ms"].into_iter().chain(names).collect();
    serve(setting.dir.path(), &words)
}

/// Returns the pages of a device in its lender's files, by the table of the device's frames.
fn lender_pages(pages: &Path, name: &str) -> BTreeSet<Vec<u8>> {
    let is_record = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    let records = fs::read_dir(pages)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| is_record(path));
    let record = |path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let record = records.map(record).find(|record| record["note"]["export"] == name).unwrap();
    let (id, group) = (record["id"].as_str().unwrap(), record["group"].as_str().unwrap());
    let table = fs::read(pages.join(format!("{id}.{group}.table"))).unwrap();
    let frames = fs::File::open(pages.join(format!("{group}.frames"))).unwrap();
    let entries =
        table[..64 << 10].chunks(4).map(|entry| u32::from_le_bytes(entry.try_into().unwrap()));
    let page = |frame: u32| {
        let mut page = vec![0; PAGE_BYTES as usize];
        frames.read_exact_at(&mut page, u64::from(frame) * PAGE_BYTES).unwrap();
        page
    };
    entries.filter(|frame| *frame != 0).map(page).collect()
}

#[test]
fn a_lender_holds_no_equal_page_of_two_groups() {
    let Some(tenants) = Tenants::new() else { return };
    let setting = &tenants.setting;
    let mut lender = sharing_lender(setting, &["a", "b", "c"]);
    for (at, group) in ["blue", "blue", "red"].into_iter().enumerate() {
        let (name, uri) = (["one", "two", "three"][at], lender.ready["uris"][at].as_str().unwrap());
        let mut program = tenants.program(name, group, &["--lender", uri]);
        program.does("fill 1 2 3");
        drop(program);
        wait_until("no program maps the region", || {
            setting.show(name)["programs"].as_array().unwrap().is_empty()
        });
        setting.done(&["region", "persist", name]);
    }
    let saved = |report: Value| number(&report, "saved") == 3 * PAGES_PER_KIND * PAGE_BYTES;
    assert!((0..200).any(|_| saved(lender.daemon.report().unwrap())));
    let [one, two, three] = ["a", "b", "c"].map(|name| lender_pages(&lender.pages(), name));
    assert!(one.len() as u64 == 3 * PAGES_PER_KIND && one == two && three.len() == one.len());
    assert!(one.is_disjoint(&three));
    ["one", "two", "three"].iter().for_each(|name| setting.remove(name));
    assert_eq!(lender.end(Signal::TERM).unwrap(), Some(0));
}

/// Makes a volume over a device of a lender, encrypted as a group's.
fn volume(lender: &Export, name: &str, encryption: &Encryption) -> Volume {
    let config = VolumeConfig {
        id: VolumeId::random(),
        capacity: Bytes(EXTENT_SIZE),
        workers: 1,
        io_timeout: Duration::from_secs(60),
        tls: None,
        spill: None,
        ledger: None,
    };
    let volume = Volume::new(config).unwrap();
    let uri: aquifer_nbd::Uri = lender.uri().parse().unwrap();
    let target = LeaseTarget {
        lease: LeaseId::random(),
        lender: "lender".parse().unwrap(),
        address: uri.address,
        protocol: Protocol::Nbd { export: name.to_owned(), secure: false },
        capacity: Bytes(EXTENT_SIZE),
        encryption: Some(encryption.clone()),
        claim: None,
    };
    volume.add_lease(target).unwrap();
    volume
}

#[test]
fn store_times_at_a_lender_reveal_no_page_of_another_group() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", dir.path().join("sharing").display());
    let words = ["64M", "--nbd", &socket, "--share", "--name", "a", "--name", "b", "--name", "c"];
    let measured = |round| {
        let lender = serve(dir.path(), &words);
        let [blue, red] = [0; 2]
            .map(|_| Encryption { mode: EncryptionMode::Deterministic, ..Encryption::random() });
        let [victim, mate, attacker] = [("a", &blue), ("b", &red), ("c", &red)]
            .map(|(name, encryption)| volume(&lender, name, encryption));
        let content = |number: u64| format!("{number:08}").repeat(512).into_bytes();
        for number in 0..3 * PAGES_PER_KIND {
            match number % 3 {
                0 => victim.write(WORKER, number * PAGE_BYTES, &content(number)).unwrap(),
                2 => mate.write(WORKER, number * PAGE_BYTES, &content(number)).unwrap(),
                _ => {}
            }
        }
        let timed = |what: &mut dyn FnMut(u64)| {
            let mut times = [const { Vec::new() }; 3];
            for number in by_chance(3 * PAGES_PER_KIND, round) {
                let began = Instant::now();
                what(number);
                times[(number % 3) as usize].push(began.elapsed().as_nanos() as u64);
            }
            let [other, nobody, own] = times;
            (auc(&other, &nobody), auc(&own, &nobody))
        };
        let write = timed(&mut |number| {
            attacker.write(WORKER, number * PAGE_BYTES, &content(number)).unwrap()
        });
        let mut page = [0; PAGE_BYTES as usize];
        let read =
            timed(&mut |number| attacker.read(WORKER, number * PAGE_BYTES, &mut page).unwrap());
        let again = timed(&mut |number| {
            attacker.write(WORKER, number * PAGE_BYTES, &content(number + 10_000)).unwrap()
        });
        [write, read, again]
    };
    at_best(measured, |found| found.iter().all(|(other, _)| (other - 0.5).abs() < CHANCE));
}
