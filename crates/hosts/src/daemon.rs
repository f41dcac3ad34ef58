//! The program `aquifer`, and the words that start each of its daemons.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{During as _, Error, Result};

/// The words of a host's agent.
pub const AGENT: &[&str] = &["serve", "agent"];
/// The words of an export of memory, before its size.
pub const EXPORT: &[&str] = &["serve", "export", "--size"];
/// The words of a group's scanner, before the group's name.
pub const SCANNER: &[&str] = &["serve", "dedup"];
/// The words of a group's cache of disks, before the group's name.
pub const DISK_CACHE: &[&str] = &["serve", "disk-cache"];
/// The words of the balancer of groups.
pub const GROUP_BALANCER: &[&str] = &["serve", "reprovision"];
/// The words of the balancer of VMs.
pub const VM_BALANCER: &[&str] = &["serve", "vm-balancer"];

/// The program `aquifer`.
#[derive(Clone, Debug)]
pub struct Binary(PathBuf);

impl Binary {
    /// Names the program's file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Returns the command `aquifer` with files in `run_dir`.
    pub fn command(&self, run_dir: &Path) -> Command {
        let mut command = Command::new(&self.0);
        command.env("AQUIFER_RUN_DIR", run_dir).env_remove("AQUIFER_SOCKET");
        command.env("AQUIFER_VM_DIR", run_dir.join("definitions"));
        command
    }

    /// Returns the command of an agent.
    pub fn agent(&self, config: &Path) -> Command {
        let mut command = Command::new(&self.0);
        command.args(AGENT).arg("--config").arg(config).stdin(Stdio::null());
        command
    }

    /// Returns the command `aquifer WORDS` with JSON as its output.
    pub fn json(&self, run_dir: &Path, words: &[&str]) -> Command {
        let mut command = self.command(run_dir);
        command.arg("--json").args(words);
        command
    }

    /// Admits hosts to the cluster in `dir`; makes the cluster if there is none.
    ///
    /// # Errors
    /// If `aquifer cluster init` fails.
    pub fn init<'a>(
        &self,
        dir: &Path,
        hosts: impl IntoIterator<Item = (&'a str, Ipv4Addr)>,
    ) -> Result<()> {
        let mut command = self.json(dir, &["cluster", "init", "--dir"]);
        command.arg(dir);
        for (name, address) in hosts {
            command.args(["--host", name, "--address", &address.to_string()]);
        }
        answer::<Value>(&mut command).map(drop)
    }
}

/// Runs a command that must succeed; returns its answer, JSON, which may be nothing.
///
/// # Errors
/// If it cannot be run, or fails, or answers something else.
pub fn answer<T: DeserializeOwned>(command: &mut Command) -> Result<T> {
    let what = || {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        format!("running 'aquifer {}'", words.join(" "))
    };
    let what = what();
    let output = command.stdin(Stdio::null()).output().during(|| what.as_str())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let why = if said.is_empty() { output.status.to_string() } else { said };
        return Err(Error::new(what, why));
    }
    let text = if output.stdout.is_empty() { b"null" } else { output.stdout.as_slice() };
    serde_json::from_slice(text).during(|| what)
}
