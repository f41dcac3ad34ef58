//! The program `aquifer`, and its daemons: the words that start each one, and their reports.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
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

/// A process that reports events and may take orders, each a line; its drop kills it.
#[derive(Debug)]
pub struct Daemon<Event = Value> {
    child: Child,
    orders: Option<ChildStdin>,
    /// Locked, so that threads may share a daemon.
    events: Mutex<Receiver<Result<Event>>>,
}

impl<Event: DeserializeOwned + Send + 'static> Daemon<Event> {
    /// Starts the process; it takes orders if its command pipes standard input.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let what = || "starting a daemon";
        let mut child = command.stdout(Stdio::piped()).spawn().during(what)?;
        let output = child.stdout.take().ok_or_else(|| Error::new(what(), "it has no output"))?;
        // Without a buffer: a process whose reports nobody reads must wait.
        let (sender, events) = mpsc::sync_channel(0);
        // The thread ends with the process, or when the receiver is gone.
        thread::spawn(move || {
            let mut lines = BufReader::new(output).lines().map_while(std::io::Result::ok);
            let event = |line: String| serde_json::from_str(&line).during(|| format!("'{line}'"));
            lines.try_for_each(|line| sender.send(event(line)))
        });
        Ok(Self { orders: child.stdin.take(), child, events: Mutex::new(events) })
    }

    /// Waits for the next report.
    ///
    /// # Errors
    /// If the process ends, or reports something else.
    pub fn report(&mut self) -> Result<Event> {
        self.events().recv().unwrap_or_else(|_| Err(self.died()))
    }

    /// Waits for an event that `wanted` turns into a value; `None` if `deadline` passes first.
    ///
    /// # Errors
    /// As [`Daemon::report`].
    pub fn wait<T>(
        &mut self,
        deadline: Instant,
        mut wanted: impl FnMut(Event) -> Option<T>,
    ) -> Result<Option<T>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events().recv_timeout(left) {
                Ok(event) => {
                    if let Some(found) = wanted(event?) {
                        return Ok(Some(found));
                    }
                    if left.is_zero() {
                        return Ok(None);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
            }
        }
    }

    fn events(&mut self) -> &mut Receiver<Result<Event>> {
        self.events.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reason why there are no more reports.
    fn died(&mut self) -> Error {
        let why = match self.ended_within(Duration::from_secs(5)) {
            Some(status) => format!("it ended with {status}"),
            None => "it stopped reporting".to_owned(),
        };
        Error::new("running a daemon", why)
    }

    /// Sends an order.
    ///
    /// # Errors
    /// If the process has died, or takes none.
    pub fn order(&mut self, order: &str) -> Result<()> {
        let orders = self.orders.as_mut();
        let sent = orders.map(|orders| writeln!(orders, "{order}").and_then(|()| orders.flush()));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.died()) }
    }

    /// Ends the orders.
    pub fn close(&mut self) {
        self.orders = None;
    }

    /// Returns its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits for its end; `None` if it goes on for so long.
    pub fn ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                _ => return None,
            }
        }
    }

    /// Ends it by a signal, and waits for its end.
    ///
    /// # Errors
    /// If the signal cannot be sent.
    pub fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        // Another process may have the number of one that has ended.
        if self.ended_within(Duration::ZERO).is_none() {
            kill_process(self.pid(), signal).during(|| "ending a daemon")?;
        }
        self.child.wait().during(|| "ending a daemon")
    }
}

impl Daemon {
    /// Waits for a report of which `is` holds.
    ///
    /// # Errors
    /// If none comes in time, or as [`Daemon::report`].
    pub fn until(
        &mut self,
        what: &str,
        timeout: Duration,
        is: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let mut last = Value::Null;
        let found = self.wait(Instant::now() + timeout, |report| {
            last = report;
            is(&last).then(|| last.clone())
        })?;
        found.ok_or_else(|| Error::new(format!("waiting for: {what}"), last))
    }
}

impl<Event> Drop for Daemon<Event> {
    fn drop(&mut self) {
        // The process may have ended already. The wait is needed in any case: a zombie holds its
        // cgroup.
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
    /// As [`Daemon::end`].
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
