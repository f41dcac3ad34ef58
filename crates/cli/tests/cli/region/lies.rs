//! Tests of a lender whose root changes the pages of a region.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;

use aquifer_store::tmpfs::stores;

use super::framework::{Setting, kill};
use crate::common::{serve, stdout, wait_until};

const PAGE: usize = 4096;

/// What a lender does to all pages that it stores, given those that it stored before.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Flips,
    Swaps,
    Replays,
    Zeroes,
}

impl Lie {
    fn tell(self, right: &[u8], old: &[u8]) -> Vec<u8> {
        let mut all = right.to_vec();
        match self {
            Self::Flips => all.iter_mut().skip(77).step_by(PAGE).for_each(|byte| *byte ^= 1),
            Self::Swaps => all.rotate_left(PAGE),
            Self::Replays => all.copy_from_slice(old),
            Self::Zeroes => all.fill(0),
        }
        all
    }
}

/// Returns the file in which an export with this directory keeps the pages of its lease.
fn pages_in(store: &std::path::Path) -> PathBuf {
    let all = fs::read_dir(store).unwrap().map(|entry| entry.unwrap().path());
    all.max_by_key(|path| path.metadata().unwrap().blocks()).unwrap()
}

fn all(file: &File) -> Vec<u8> {
    let mut all = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut all, 0).unwrap();
    all
}

/// Checks that the program dies of SIGBUS: an answer would be a claim about pages that nobody has.
fn dies(setting: &Setting, region: &std::path::Path, what: &str) {
    let mut program = setting.start(region);
    program.order("check 7");
    let end = program.child.wait().unwrap();
    assert_eq!(end.signal(), Some(7), "{what}: {end}");
}

#[test]
fn no_program_sees_a_page_that_a_lender_changed() {
    let Some(setting) = Setting::new() else { return };
    // Pages leave unencrypted to a unix socket, and encrypted to any other address.
    let socket = format!("unix:{}", setting.dir.path().join("glass").display());
    let encrypted =
        [Lie::Flips, Lie::Swaps, Lie::Replays, Lie::Zeroes].map(|lie| (lie, "127.0.0.1:0"));
    for (lie, address) in encrypted.into_iter().chain([(Lie::Swaps, socket.as_str())]) {
        let what = format!("{lie:?} at {address}");
        let store = tempfile::tempdir_in(stores().unwrap()).unwrap();
        let words = ["128M", "--nbd", address, "--dir", store.path().to_str().unwrap()];
        let lender = serve(setting.dir.path(), &words);
        let more = ["--fault-timeout", "1s", "--prefetch", "off"];
        let region = setting.create_over(&lender, "seen", &more);
        let mut program = setting.start(&region);
        program.does("write 6");
        setting.done(&["region", "persist", "seen"]);
        let file = OpenOptions::new().read(true).write(true).open(pages_in(store.path()));
        let file = file.unwrap();
        let old = all(&file);
        program.does("write 7");
        setting.done(&["region", "persist", "seen"]);
        drop(program);
        let right = all(&file);
        assert!(right != old, "{what}: the lender stores nothing");
        file.write_all_at(&lie.tell(&right, &old), 0).unwrap();
        dies(&setting, &region, &what);
        let shown = setting.show("seen");
        assert_eq!(shown["volume"]["leases"][0]["state"], "lost", "{what}");
        let error = shown["volume"]["last_error"].as_str().unwrap();
        let lease = shown["volume"]["leases"][0]["lease"].as_str().unwrap();
        assert!(error.contains("it returned") && error.contains(lease), "{what}: {error}");
        assert!(stdout(&setting.aquifer(&["region", "show", "seen"])).contains("lost"));
        // The next engine knows the pages, too.
        next_engine(&setting);
        dies(&setting, &region, &format!("{what}, another engine"));
        // If the lender has the right pages after all, the engine after that serves them.
        file.write_all_at(&right, 0).unwrap();
        next_engine(&setting);
        setting.start(&region).does("check 7");
        setting.remove("seen");
    }
}

fn next_engine(setting: &Setting) {
    kill(&setting.show("seen")["pid"]);
    wait_until("another engine serves the region", || {
        setting.aquifer(&["region", "show", "seen"]).status.success()
    });
}
