//! What can be run in a guest.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::process::{Output, Process};

/// How long a command may take where nothing is said: for hangs, on a machine that has other things to do.
const PATIENCE: Duration = Duration::from_secs(120);

/// Something that runs shell commands.
pub trait Shell {
    /// Runs a shell command to its end and returns what it has left, whatever it ended with.
    ///
    /// # Errors
    /// If it has not ended after two minutes, or the host is not running; the error shows the host's console.
    fn run(&self, command: &str) -> Result<Output> {
        self.run_within(command, PATIENCE)
    }

    /// The same with another limit.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        let process = self.spawn(command)?;
        process.end_input();
        process.output(limit)
    }

    /// Runs a shell command that must succeed, and returns what it wrote to standard output.
    ///
    /// # Errors
    /// As [`Self::run`], and if it ends with something else than 0: then with what it said.
    fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, PATIENCE)
    }

    /// The same with another limit.
    ///
    /// # Errors
    /// As [`Self::sh`].
    fn sh_within(&self, command: &str, limit: Duration) -> Result<String> {
        let process = self.spawn(command)?;
        process.end_input();
        Ok(String::from_utf8_lossy(&process.bytes(limit)?).into_owned())
    }

    /// Starts a shell command, and lets it run beside others.
    ///
    /// # Errors
    /// If nothing runs there.
    fn spawn(&self, command: &str) -> Result<Process>;

    /// Writes a file in the host, and the folders above it.
    ///
    /// # Errors
    /// If that fails there.
    fn write(&self, path: &str, content: impl AsRef<[u8]>) -> Result<()> {
        let path = quoted(path);
        let process = self.spawn(&format!("mkdir -p \"$(dirname {path})\" && cat >{path}"))?;
        process.write(content);
        process.end_input();
        process.bytes(PATIENCE).map(|_| ())
    }

    /// Reads a file of the host.
    ///
    /// # Errors
    /// If that fails there.
    fn read(&self, path: &str) -> Result<Vec<u8>> {
        self.spawn(&format!("cat {}", quoted(path)))?.bytes(PATIENCE)
    }

    /// Copies a file or a folder of this machine to the host, as `there`, with its permissions but for the owner.
    ///
    /// # Errors
    /// If it cannot be read here or written there.
    fn push(&self, here: &Path, there: &str) -> Result<()> {
        if !here.is_dir() {
            let content =
                std::fs::read(here).with_context(|| format!("cannot read {}", here.display()))?;
            return self.write(there, content);
        }
        let mut tar = std::process::Command::new("tar");
        let packed = crate::command::bytes(tar.args(["-c", "-C"]).arg(here).arg("."))?;
        let there = quoted(there);
        let process = self.spawn(&format!("mkdir -p {there} && tar -x -C {there}"))?;
        process.write(packed);
        process.end_input();
        process.bytes(PATIENCE).map(|_| ())
    }

    /// Copies a file of the host to this machine.
    ///
    /// # Errors
    /// If it cannot be read there or written here.
    fn pull(&self, there: &str, here: &Path) -> Result<()> {
        std::fs::write(here, self.read(there)?)
            .with_context(|| format!("cannot write {}", here.display()))
    }
}

/// A word that a shell takes as it is.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
