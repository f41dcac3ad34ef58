//! The parts that the tests of the binary share.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Returns the binary under test, with a run directory of the test's own.
pub fn aquifer(run_dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
    command.env("AQUIFER_RUN_DIR", run_dir).env_remove("AQUIFER_SOCKET");
    command
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

/// Waits until `condition` holds.
///
/// # Panics
/// If it does not hold within two minutes.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
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

/// A running `aquifer serve export` that is ready; its drop kills it.
pub struct Export {
    /// The process.
    pub child: Child,
    /// Its answer when it was ready.
    pub ready: Value,
}

impl Export {
    /// Starts an export with these arguments, its size first.
    pub fn start(run_dir: &Path, words: &[&str]) -> Self {
        let mut command = aquifer(run_dir);
        let mut child = command
            .args(["serve", "export", "--json", "--size"])
            .args(words)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap();
        Self { child, ready }
    }

    /// Returns its first URI.
    pub fn uri(&self) -> &str {
        self.ready["uri"].as_str().unwrap()
    }

    /// Returns the directory of its pages.
    pub fn pages(&self) -> PathBuf {
        Path::new("/dev/shm/aquifer").join(format!("export-{}", self.child.id()))
    }

    /// Ends it by a signal; returns its exit code.
    pub fn end(&mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(self.pages());
    }
}
