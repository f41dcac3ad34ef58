//! The program `aquifer`, and its daemons: the words that start each one, and their reports.

use std::io::{BufRead as _, BufReader, Lines};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{During as _, Error, Result};

/// The words of a host's agent.
pub const AGENT: &[&str] = &["agent"];
/// The words of an export of memory.
pub const EXPORT: &[&str] = &["export"];
/// The words of a group's scanner, before the group's name.
pub const SCANNER: &[&str] = &["group", "scan"];
/// The words of a group's cache of disks, before the group's name.
pub const DISK_CACHE: &[&str] = &["group", "cache"];
/// The words of the balancer of groups.
pub const GROUP_BALANCER: &[&str] = &["group", "balance"];
/// The words of the balancer of VMs.
pub const VM_BALANCER: &[&str] = &["vm", "balance"];

/// The program `aquifer`.
#[derive(Clone, Debug)]
pub struct Binary(PathBuf);

impl Binary {
    /// Names the program's file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Returns the program's file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the command `aquifer` with files in `run_dir`.
    pub fn command(&self, run_dir: &Path) -> Command {
        let mut command = Command::new(&self.0);
        command.env("AQUIFER_RUN_DIR", run_dir).env_remove("AQUIFER_SOCKET");
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
    /// If `aquifer init` fails.
    pub fn init<'a>(
        &self,
        dir: &Path,
        hosts: impl IntoIterator<Item = (&'a str, Ipv4Addr)>,
    ) -> Result<()> {
        let mut command = self.json(dir, &["init", "--dir"]);
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

/// A daemon that prints lines of JSON; its drop kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// The lines that it prints.
    pub reports: Lines<BufReader<ChildStdout>>,
}

impl Daemon {
    /// Starts the daemon.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let what = || "starting a daemon";
        let mut child = command.stdout(Stdio::piped()).spawn().during(what)?;
        let output = child.stdout.take().ok_or_else(|| Error::new(what(), "it has no output"))?;
        Ok(Self { child, reports: BufReader::new(output).lines() })
    }

    /// Waits for the next report.
    ///
    /// # Errors
    /// If the daemon ends.
    pub fn report(&mut self) -> Result<Value> {
        let what = || "waiting for a daemon's report";
        let line = self.reports.next().ok_or_else(|| Error::new(what(), "it has ended"))?;
        serde_json::from_str(&line.during(what)?).during(what)
    }

    /// Waits for a report of which `is` holds.
    ///
    /// # Errors
    /// If the daemon ends, or if none comes in time.
    pub fn until(
        &mut self,
        what: &str,
        timeout: Duration,
        is: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + timeout;
        loop {
            let report = self.report()?;
            if is(&report) {
                return Ok(report);
            }
            if Instant::now() > deadline {
                return Err(Error::new(format!("waiting for: {what}"), report));
            }
        }
    }

    /// Returns its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends it by a signal, and waits for its end.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        kill_process(self.pid(), signal).during(|| "ending a daemon")?;
        self.child.wait().during(|| "ending a daemon")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running export of memory that is ready; its drop kills it.
#[derive(Debug)]
pub struct Export {
    /// The process.
    pub daemon: Daemon,
    /// Its answer when it was ready.
    pub ready: Value,
}

impl Export {
    /// Returns the command of an export.
    pub fn command(aquifer: &Binary, run_dir: &Path) -> Command {
        aquifer.json(run_dir, EXPORT)
    }

    /// Starts an export by such a command, and waits until it is ready.
    ///
    /// # Errors
    /// If it cannot be started, or ends at once.
    pub fn start(command: &mut Command) -> Result<Self> {
        let what = |error: Error| Error::new("starting a lender", error.why);
        let mut daemon = Daemon::start(command).map_err(what)?;
        let ready = daemon.report().map_err(what)?;
        Ok(Self { daemon, ready })
    }

    /// Returns its first URI; empty if it has none.
    pub fn uri(&self) -> &str {
        self.ready["uri"].as_str().unwrap_or_default()
    }

    /// Returns the directory of its pages, unless its command names another.
    pub fn pages(&self) -> PathBuf {
        Path::new("/dev/shm/aquifer").join(format!("export-{}", self.daemon.pid().as_raw_pid()))
    }

    /// Ends it by a signal; returns its exit code.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn end(&mut self, signal: Signal) -> Result<Option<i32>> {
        self.daemon.end(signal).map(|status| status.code())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.daemon.end(Signal::KILL);
        let _ = std::fs::remove_dir_all(self.pages());
    }
}
