//! Tests of the balancer with a group that has a problem.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use aquifer_control_socket::ControlCall;
use aquifer_disk_cache::{Options, Service};
use aquifer_group::balance::{BalanceRound, Balancing};
use aquifer_group::{Agreement, Agreements, GroupEncryption};
use aquifer_page::{Bytes, Group};
use aquifer_region::process::GroupFiles;

fn is_root() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        eprintln!("skipped: needs root");
    }
    is
}

fn agreed(dir: &Path, groups: &[&str]) -> Agreements {
    let agreements = Agreements::of(&dir.join("groups"));
    for group in groups {
        agreements
            .create(&Agreement::new(group.parse().unwrap(), GroupEncryption::Random))
            .unwrap();
    }
    agreements
}

fn cache(dir: &Path, group: &str) -> Service {
    let options = Options { size: Bytes::mib(1), ..Options::default() };
    Service::start(&dir.join("regions"), group.parse().unwrap(), options).unwrap()
}

fn names(round: &BalanceRound) -> Vec<&str> {
    round.groups.iter().map(|one| one.account.group.as_str()).collect()
}

#[test]
fn an_agreement_that_cannot_be_read_stops_no_other_group() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let agreements = agreed(dir.path(), &["blue", "red"]);
    let _caches = (cache(dir.path(), "blue"), cache(dir.path(), "red"));
    fs::write(agreements.file(&"green".parse().unwrap()), "name = green").unwrap();
    let mut balancing = Balancing::new(dir.path(), agreements.clone());
    let round = balancing.step(true).unwrap();
    assert_eq!(names(&round), ["blue", "red"]);
    assert!(round.malformed[0].contains("green.toml"), "{:?}", round.malformed);
    // A group whose agreement could be read earlier keeps that one.
    fs::write(agreements.file(&"red".parse().unwrap()), "").unwrap();
    let round = balancing.step(true).unwrap();
    assert_eq!((names(&round), round.malformed.len()), (vec!["blue", "red"], 2));
    fs::remove_file(agreements.file(&"red".parse().unwrap())).unwrap();
    assert_eq!(names(&balancing.step(true).unwrap()), ["blue"]);
}

#[test]
fn a_cache_that_does_not_answer_stops_no_other_group() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let agreements = agreed(dir.path(), &["blue", "red"]);
    let blue_cache = cache(dir.path(), "blue");
    // A stopped process: no thread accepts from its backlog.
    let red: Group = "red".parse().unwrap();
    let files = GroupFiles::new(&dir.path().join("regions"), &red);
    fs::create_dir_all(files.directory()).unwrap();
    let listener = UnixListener::bind(files.cache_control()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let short = Duration::from_millis(50);
    let queued: Vec<_> =
        std::iter::from_fn(|| ControlCall::connect(&files.cache_control(), "fill", short).ok())
            .collect();
    let round = Balancing::new(dir.path(), agreements).step(true).unwrap();
    assert_eq!(names(&round), ["blue", "red"]);
    let [blue, red] = &round.groups[..] else { panic!("{round:?}") };
    assert!(blue.cache.is_some() && blue.failed.is_empty(), "{blue:?}");
    assert!(red.failed.iter().any(|why| why.contains("no answer to 'status' within")), "{red:?}");
    drop((queued, listener));
    // The regions' tmpfs is unmounted with its last file.
    fs::remove_dir_all(files.directory()).unwrap();
    drop(blue_cache);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(dir.path().to_str().unwrap()), "{mounts}");
}
