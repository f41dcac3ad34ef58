//! A runner for tests that measure their process, and so need one of their own.

use std::env;
use std::process::Command;

const ALONE: &str = "AQUIFER_TEST_ALONE";

/// Runs `test` in a process of its own; `name` is the test's full path.
///
/// `cargo test` runs the tests of a program as threads of one process, so measurements of the
/// process would include other tests. Besides, a child that another test starts holds this
/// process's files, and so its locks, between fork and exec.
pub fn alone(name: &str, test: impl FnOnce()) {
    if env::var_os(ALONE).is_some() {
        return test();
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    let output = command.env(ALONE, "yes").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{name}, alone: {said}{complained}"
    );
}
