//! Tests of volumes without an agent that have two copies of each page, at lenders that die and
//! come back.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aquifer_cli::load::{Event, Verdict};
use aquifer_hosts::Daemon;
use aquifer_store::tmpfs::stores;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Dir, device, stored};
use crate::agents::framework::{load_program, the_kernels_swap};
use crate::common::{
    Export, aquifer, lacks_cgroups, lacks_devices, serve, stderr, stdout, wait_until,
};

/// How long a load may take to write or to verify its memory.
const LOAD_TIMEOUT: Duration = Duration::from_secs(180);

/// A lender whose pages outlive its process.
struct Lender {
    dir: TempDir,
    store: TempDir,
    export: Export,
}

impl Lender {
    fn start() -> Self {
        let (dir, store) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir_in(stores().unwrap()).unwrap());
        let export = serve_at(&dir, &store);
        Self { dir, store, export }
    }

    fn dies(&mut self) {
        self.export.end(Signal::KILL).unwrap();
    }

    fn is_back(&mut self) {
        self.export = serve_at(&self.dir, &self.store);
    }

    fn uri(&self) -> &str {
        self.export.uri()
    }
}

fn serve_at(dir: &TempDir, store: &TempDir) -> Export {
    let address = format!("unix:{}", dir.path().join("lender").display());
    serve(dir.path(), &["128M", "--nbd", &address, "--dir", store.path().to_str().unwrap()])
}

/// Returns the second copy of the only lease of the only volume.
fn copy(dir: &Dir) -> Value {
    let output = dir.aquifer(&["volume", "list", "--json"]);
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(all.as_array().unwrap().len(), 1, "{all}");
    assert!(!stdout(&output).contains("key"), "no key may leave the host: {all}");
    all[0]["leases"][0]["copy"].clone()
}

#[track_caller]
fn is_whole(dir: &Dir) {
    wait_until("both copies are whole", || {
        let copy = copy(dir);
        copy["answer"] == json!([true, true]) && copy["lacks"] == 0 && copy["first_lacks"] == 0
    });
}

/// Returns content of whole pages that follows from a seed, at an address that direct I/O takes.
fn content(seed: u64) -> (Vec<u8>, usize) {
    const LENGTH: usize = 3 << 20;
    let mut bytes = vec![0; LENGTH + 4096];
    let first = bytes.as_ptr().align_offset(4096);
    for (number, word) in bytes[first..first + LENGTH].chunks_exact_mut(8).enumerate() {
        let mixed = (number as u64 + 1).wrapping_mul(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        word.copy_from_slice(&mixed.to_le_bytes());
    }
    (bytes, first)
}

/// Writes content across two extents, past the page cache.
fn write(device: &str, seed: u64) {
    let (bytes, first) = content(seed);
    let block = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
    block.write_all_at(&bytes[first..first + (3 << 20)], 63 << 20).unwrap();
}

/// Asserts that the device has this content.
#[track_caller]
fn check(device: &str, seed: u64) {
    let (wanted, from) = content(seed);
    let (mut found, at) = content(seed + 1);
    let block = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
    block.read_exact_at(&mut found[at..at + (3 << 20)], 63 << 20).unwrap();
    assert!(found[at..at + (3 << 20)] == wanted[from..from + (3 << 20)], "version {seed}");
}

#[test]
fn a_mirrored_device_outlives_each_of_its_lenders() {
    if lacks_devices() {
        return;
    }
    let mut lenders = [Lender::start(), Lender::start()];
    let dir = Dir::new();
    let uris = [lenders[0].uri(), lenders[1].uri()];
    let attached = dir.attach(&[uris[0], uris[1], "--protection", "mirror"]);
    assert_eq!(attached["capacity"], 128 << 20);
    let device = device(&attached);
    let mut seed = 1;
    write(device, seed);
    for dead in [0, 1, 0] {
        is_whole(&dir);
        lenders[dead].dies();
        check(device, seed);
        seed += 1;
        write(device, seed);
        check(device, seed);
        let shown = stdout(&dir.aquifer(&["volume", "list"]));
        assert!(shown.contains(if dead == 0 { "alone has" } else { "lacks" }), "{shown}");
        // It comes back with the pages that it had when it died.
        lenders[dead].is_back();
    }
    is_whole(&dir);
    let shown = stdout(&dir.aquifer(&["volume", "list"]));
    assert!(shown.contains("complete"), "{shown}");
    check(device, seed);
    let output = dir.aquifer(&["volume", "detach", device]);
    assert!(output.status.success(), "{}", stderr(&output));
    for lender in &lenders {
        assert_eq!(stored(&lender.export), 0, "the lender must have its memory back");
    }
}

/// `aquifer run` of a load three times as large as its RAM.
struct Run {
    process: Daemon<Event>,
}

impl Run {
    fn start(dir: &Dir, lenders: &[Lender; 2]) -> Self {
        let mut run = aquifer(dir.path());
        run.args(["run", "--local", "24M", "--protection", "mirror"]);
        lenders.iter().for_each(|lender| _ = run.args(["--lender", lender.uri()]));
        run.arg("--").arg(load_program()).args(["load", "--bytes", "72M", "--hold"]);
        Self { process: Daemon::start(run.stdin(Stdio::piped())).unwrap() }
    }

    #[track_caller]
    fn wait<T>(&mut self, what: &str, wanted: impl Fn(Event) -> Option<T>) -> T {
        let found = self.process.wait(Instant::now() + LOAD_TIMEOUT, wanted).unwrap();
        found.unwrap_or_else(|| panic!("the load has not {what} within {LOAD_TIMEOUT:?}"))
    }

    #[track_caller]
    fn filled(&mut self) {
        self.wait("filled its memory", |event| matches!(event, Event::Filled { .. }).then_some(()));
    }

    /// Asserts that each byte is as last written.
    #[track_caller]
    fn verify(&mut self) {
        self.process.order("verify").unwrap();
        let verdict = self.wait("verified its memory", |event| match event {
            Event::Verified(verdict) => Some(verdict),
            _ => None,
        });
        let Verdict { pages_verified, pages_lost, .. } = verdict;
        assert_eq!((pages_verified, pages_lost), (18432, 0), "{verdict:?}");
    }
}

#[test]
fn a_command_goes_on_when_a_lender_of_its_swap_dies() {
    if lacks_devices() || lacks_cgroups() {
        return;
    }
    let _swap = the_kernels_swap();
    let mut lenders = [Lender::start(), Lender::start()];
    let dir = Dir::new();
    let mut run = Run::start(&dir, &lenders);
    run.filled();
    for dead in [0, 1] {
        is_whole(&dir);
        run.process.order("rewrite").unwrap();
        lenders[dead].dies();
        run.filled();
        run.verify();
        lenders[dead].is_back();
    }
    is_whole(&dir);
    run.verify();
    run.process.order("quit").unwrap();
    let ended = run.process.ended_within(LOAD_TIMEOUT).unwrap();
    assert!(ended.success(), "{ended}");
    assert!(dir.volumes().is_empty(), "{:?}", dir.volumes());
    assert!(lenders.iter().all(|lender| stored(&lender.export) == 0));
}

#[test]
fn a_mirrored_volume_needs_lenders_in_pairs() {
    if lacks_devices() {
        return;
    }
    let lenders = [Lender::start(), Lender::start()];
    let [one, other] = [lenders[0].uri(), lenders[1].uri()];
    let dir = Dir::new();
    let mirror = ["--protection", "mirror"];
    for (uris, why) in [
        (&[one][..], "no second lender"),
        (&[one, one], "copy of its own pages"),
        (&[one, other, one], "no second lender"),
    ] {
        let refused = dir.aquifer(&[&["volume", "attach"], uris, &mirror].concat());
        assert_eq!(refused.status.code(), Some(1));
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
    }
    let uri = "nvme+tcp://192.0.2.1/nqn.x";
    for words in [
        // The kernel's own initiator writes to one lender.
        &["volume", "attach", uri, uri, "--direct", "--protection", "mirror"][..],
        &["run", "--local", "64M", "--protection", "mirror", "--", "true"],
        &["volume", "attach", one, other, "--protection", "disk"],
    ] {
        assert_eq!(dir.aquifer(words).status.code(), Some(2), "{words:?}");
    }
    dir.attach(&[one, other, "--protection", "mirror"]);
    // An export that holds a copy serves no other volume.
    let refused = Command::output(aquifer(dir.path()).args(["volume", "attach", other])).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("a volume of 'aquifer volume attach'"),
        "{}",
        stderr(&refused)
    );
}
