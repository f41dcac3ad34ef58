//! Tests of the demos as an operator starts them: `aquifer demo`.
//!
//! They need `aquifer` and the preloaded library beside `aquifer-demo`, as 'cargo build --workspace
//! --lib --bins' makes them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod command;
mod region;

use std::path::Path;
use std::process::{Command, Output};

/// Returns `aquifer` beside the program under test, with a run directory of the test's own.
fn aquifer(run_dir: &Path) -> Command {
    let path = Path::new(env!("CARGO_BIN_EXE_aquifer-demo")).with_file_name("aquifer");
    assert!(path.is_file(), "no {}: run 'cargo build --workspace --lib --bins'", path.display());
    let mut command = Command::new(path);
    command.env("AQUIFER_RUN_DIR", run_dir).env_remove("AQUIFER_SOCKET");
    command
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
