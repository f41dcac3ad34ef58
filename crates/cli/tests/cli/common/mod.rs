//! The parts that the tests of the binary share.

use std::path::Path;
use std::process::{Command, Output};

pub use aquifer_hosts::daemon::answer;
pub use aquifer_hosts::{Binary, Export, wait_until};
use serde_json::Value;

/// Returns the binary under test.
pub fn binary() -> Binary {
    Binary::new(env!("CARGO_BIN_EXE_aquifer"))
}

/// Returns the command `aquifer`, with a run directory of the test's own.
pub fn aquifer(run_dir: &Path) -> Command {
    binary().command(run_dir)
}

/// Returns whether this test cannot run here: it needs root and a memory cgroup hierarchy.
pub fn lacks_cgroups() -> bool {
    let lacks =
        !rustix::process::geteuid().is_root() || aquifer_cli::cgroup::Hierarchy::find().is_err();
    if lacks {
        eprintln!("skipped: needs root and memory cgroups");
    }
    lacks
}

/// Returns standard output as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns whether this test cannot run here: it needs root and a way to make a block device.
pub fn lacks_devices() -> bool {
    let lacks = !rustix::process::geteuid().is_root()
        || aquifer_blockdev::backend::choose(aquifer_blockdev::BackendKind::Auto).is_err();
    if lacks {
        eprintln!("skipped: needs root and ublk, nbd, or FUSE and loop devices");
    }
    lacks
}

/// Runs a command that must succeed, with JSON as its output; returns that.
#[track_caller]
pub fn done(run_dir: &Path, words: &[&str]) -> Value {
    answer(&mut binary().json(run_dir, words)).unwrap_or_else(|error| panic!("{error}"))
}

/// Makes a cluster in `dir` of the hosts `a` and `b`, both on loopback.
pub fn init_two(dir: &Path) {
    let hosts = [("a", [127, 0, 0, 1].into()), ("b", [127, 0, 0, 2].into())];
    binary().init(dir, hosts).unwrap();
}

/// Starts an export with these arguments.
#[track_caller]
pub fn serve(run_dir: &Path, words: &[&str]) -> Export {
    Export::start(Export::command(&binary(), run_dir).args(words)).unwrap()
}
