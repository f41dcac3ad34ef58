//! Shell commands and file transfers in a guest.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::process::{Output, Process};

/// Default timeout of a command on a busy machine; only a hang takes so long.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// A host or guest that runs shell commands.
pub trait Shell {
    /// Runs a shell command to its end; returns its result, also if it fails.
    ///
    /// # Errors
    /// If the command does not end within two minutes or cannot run (the error shows the host's
    /// console), or the host is off.
    fn run(&self, command: &str) -> Result<Output> {
        self.run_within(command, COMMAND_TIMEOUT)
    }

    /// Runs a shell command as [`Self::run`] does, with another timeout.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        let process = self.spawn(command)?;
        process.end_input();
        process.output(limit)
    }

    /// Runs a shell command that must succeed; returns its standard output.
    ///
    /// # Errors
    /// As [`Self::run`], and if the exit code is not 0; the error then holds the output.
    fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, COMMAND_TIMEOUT)
    }

    /// Runs a shell command as [`Self::sh`] does, with another timeout.
    ///
    /// # Errors
    /// As [`Self::sh`].
    fn sh_within(&self, command: &str, limit: Duration) -> Result<String> {
        let process = self.spawn(command)?;
        process.end_input();
        Ok(String::from_utf8_lossy(&process.bytes(limit)?).into_owned())
    }

    /// Starts a shell command, which runs beside others.
    ///
    /// # Errors
    /// If the host is off.
    fn spawn(&self, command: &str) -> Result<Process>;

    /// Writes a file in the host, and makes its parent directories.
    ///
    /// # Errors
    /// If the host cannot write the file.
    fn write(&self, path: &str, content: impl AsRef<[u8]>) -> Result<()> {
        let path = quoted(path);
        let process = self.spawn(&format!("mkdir -p \"$(dirname {path})\" && cat >{path}"))?;
        process.write(content);
        process.end_input();
        process.bytes(COMMAND_TIMEOUT).map(|_| ())
    }

    /// Reads a file of the host.
    ///
    /// # Errors
    /// If the host cannot read the file.
    fn read(&self, path: &str) -> Result<Vec<u8>> {
        self.spawn(&format!("cat {}", quoted(path)))?.bytes(COMMAND_TIMEOUT)
    }

    /// Copies a file or a directory of this machine to the host, as `there`. A directory keeps its
    /// permissions; a file gets default ones.
    ///
    /// # Errors
    /// If this machine cannot read `here`, or the host cannot write `there`.
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
        process.bytes(COMMAND_TIMEOUT).map(|_| ())
    }

    /// Copies a file of the host to this machine.
    ///
    /// # Errors
    /// If the host cannot read `there`, or this machine cannot write `here`.
    fn pull(&self, there: &str, here: &Path) -> Result<()> {
        std::fs::write(here, self.read(there)?)
            .with_context(|| format!("cannot write {}", here.display()))
    }
}

/// Quotes a word so that a shell takes it literally.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
