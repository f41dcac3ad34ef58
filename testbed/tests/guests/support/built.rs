//! Programs for hosts: those of this machine, and those of the workspace, built on demand. The
//! build is that of `scripts/test`, so that cargo builds once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use aquifer_testbed::Spec;
use serde_json::Value;

/// Returns the command `aquifer`.
pub fn aquifer() -> PathBuf {
    find(programs(), "cli", "aquifer")
}

/// Returns the example `name` of the crate in `crates/ROOM`.
pub fn example(room: &str, name: &str) -> PathBuf {
    find(programs(), room, name)
}

/// Returns the test program `name` of the crate in `crates/ROOM`.
pub fn test(room: &str, name: &str) -> PathBuf {
    match recorded_messages() {
        Some(messages) => find(&executables(&messages, true), room, name),
        None => find(&executables(&build(&["test", "--no-run", "--test", name]), true), room, name),
    }
}

/// Puts the script `name` beside the tests, and `steps.sh`, which all scripts need, into a host's
/// `/bin`.
pub fn with_script(spec: Spec, name: &str) -> Spec {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests");
    [name, "steps.sh"]
        .iter()
        .fold(spec, |spec, name| spec.file(folder.join(name), &format!("/bin/{name}")))
}

/// Finds a program of this machine; panics if it is missing.
pub fn tool(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("the tool {name} is not installed")).canonicalize().unwrap()
}

/// Returns all programs and examples of the workspace.
fn programs() -> &'static [Value] {
    static BUILT: OnceLock<Vec<Value>> = OnceLock::new();
    let build = || build(&["build", "--lib", "--bins", "--examples"]);
    BUILT.get_or_init(|| executables(&recorded_messages().unwrap_or_else(build), false))
}

/// Returns cargo's messages to `scripts/test`, which builds first and names a file with them. A
/// test that called cargo would wait for the lints.
fn recorded_messages() -> Option<String> {
    let file = std::env::var_os("AQUIFER_BUILT")?;
    Some(std::fs::read_to_string(file).unwrap())
}

/// Runs cargo; returns its messages about each program.
fn build(arguments: &[&str]) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).args([
        "--workspace",
        "--locked",
        "--message-format",
        "json-render-diagnostics",
    ]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    // Cargo's variables for a test would make some build scripts, and all their dependents, build
    // again.
    let told = std::env::vars_os().map(|(name, _)| name);
    for name in told.filter(|name| name.to_str().is_some_and(is_of_a_package)) {
        cargo.env_remove(name);
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(built.status.success(), "{cargo:?}: {}", String::from_utf8_lossy(&built.stderr));
    String::from_utf8(built.stdout).unwrap()
}

/// Selects the messages that name a program or, with `tests`, a test program.
fn executables(messages: &str, tests: bool) -> Vec<Value> {
    let messages = messages.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let wanted = |of: &Value| of["executable"].is_string() && of["profile"]["test"] == tests;
    messages.filter(wanted).collect()
}

fn is_of_a_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"]
        .iter()
        .any(|prefix| variable.starts_with(prefix))
}

fn find(programs: &[Value], room: &str, name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("crates").join(room);
    let found = programs.iter().find(|program| {
        let manifest = program["manifest_path"].as_str().unwrap_or_default();
        program["target"]["name"] == name && Path::new(manifest).starts_with(&folder)
    });
    let found = found.unwrap_or_else(|| panic!("crates/{room} has no program {name}"));
    found["executable"].as_str().unwrap().into()
}
