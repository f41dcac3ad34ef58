//! What the tests of the binary share.

#![allow(dead_code, reason = "every test program uses a part of it")]

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The binary under test, with a run directory of the test's own.
pub fn aquifer(run_dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
    command.env("AQUIFER_RUN_DIR", run_dir).env_remove("AQUIFER_SOCKET");
    command
}

/// Whether this test cannot run here: it needs root and a memory cgroup hierarchy.
pub fn lacks_cgroups() -> bool {
    let lacks = !rustix::process::geteuid().is_root() || aquifer_cli::cgroup::Hierarchy::find().is_err();
    if lacks {
        eprintln!("skipped: needs root and memory cgroups");
    }
    lacks
}

/// Standard output as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until `condition` holds.
///
/// # Panics
/// If it does not within 20 s.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "still not: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
