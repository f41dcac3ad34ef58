//! Example programs for tests to start.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// Returns the path of the example `name` of a package, and builds it if it is missing.
///
/// `make test` builds all examples first.
pub fn example(package: &str, name: &str) -> PathBuf {
    // This test's executable is target/PROFILE/deps/NAME.
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples").join(name);
    if !program.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", package, "--example", name]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(built.unwrap().success() && program.exists(), "the example {name} does not build");
    }
    program
}
