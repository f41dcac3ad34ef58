//! A command that runs in a host.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;

use crate::console::Console;
use crate::line::{End, Line, Running};
use crate::wire::{CHUNK, Kind};

/// The result of a command.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit code; 128 plus the signal's number if a signal ended the command.
    pub code: i32,
    /// The command's standard output.
    pub stdout: String,
    /// The command's standard error.
    pub stderr: String,
}

impl Output {
    /// Tells whether the exit code is 0.
    pub fn success(&self) -> bool {
        self.code == 0
    }
}

/// A command that runs, or has run, in a host. Dropping this handle does not end the command.
#[derive(Debug)]
pub struct Process {
    id: u32,
    command: String,
    console: Arc<Console>,
    line: Arc<Line>,
    running: Arc<Running>,
    /// How many bytes of standard output [`Self::wait_for`] has consumed.
    read: AtomicUsize,
}

impl Process {
    pub(crate) fn start(line: &Arc<Line>, console: &Arc<Console>, command: &str) -> Self {
        let (id, running) = line.start(command);
        let (command, console, line) = (command.to_owned(), console.clone(), line.clone());
        Self { id, command, console, line, running, read: AtomicUsize::new(0) }
    }

    /// Writes to the command's standard input.
    pub fn write(&self, data: impl AsRef<[u8]>) {
        data.as_ref().chunks(CHUNK).for_each(|chunk| self.line.say(self.id, Kind::Input, chunk));
    }

    /// Ends the command's standard input.
    pub fn end_input(&self) {
        self.line.say(self.id, Kind::InputEnd, []);
    }

    /// Sends a signal to the command's process group.
    pub fn signal(&self, signal: Signal) {
        self.line.say(self.id, Kind::Signal, [u8::try_from(signal.as_raw()).unwrap_or_default()]);
    }

    /// Tells whether the command still runs, as far as this side knows.
    pub fn is_running(&self) -> bool {
        self.running.progress().end.is_none()
    }

    /// Returns the command's standard output until this moment.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.running.progress().stdout).into_owned()
    }

    /// Waits for a line with `text` on standard output, after the lines of earlier calls; returns
    /// the line.
    ///
    /// # Errors
    /// If the command ends without such a line, or prints none within `limit`.
    pub fn wait_for(&self, text: &str, limit: Duration) -> Result<String> {
        let found = self.running.wait(limit, |progress| {
            let ended = progress.end.is_some();
            self.next_line(&progress.stdout, text).map(Ok).or_else(|| ended.then_some(Err(())))
        });
        match found {
            Some(Ok(line)) => Ok(line),
            Some(Err(())) => {
                let Output { code, stdout, stderr } = self.output(Duration::ZERO)?;
                bail!(self.failure(&format!(
                    "ended with {code} before it said '{text}':\n{stdout}{stderr}"
                )))
            }
            None => Err(self.too_late(&format!("has not said '{text}'"), limit)),
        }
    }

    fn next_line(&self, stdout: &[u8], text: &str) -> Option<String> {
        loop {
            let start = self.read.load(Ordering::Relaxed);
            let rest = stdout.get(start..)?;
            let end = rest.iter().position(|&byte| byte == b'\n')?;
            self.read.store(start + end + 1, Ordering::Relaxed);
            let line = String::from_utf8_lossy(&rest[..end]);
            if line.contains(text) {
                return Some(line.into_owned());
            }
        }
    }

    /// Passes the command's output to `out` and `err` as it comes, until the command ends; returns
    /// its exit code.
    ///
    /// # Errors
    /// As [`Self::output`], and if `out` or `err` fails; the command then gets SIGTERM.
    pub fn pass_on(
        &self,
        limit: Duration,
        mut out: impl Write,
        mut err: impl Write,
    ) -> Result<i32> {
        let deadline = Instant::now() + limit;
        let (mut passed_out, mut passed_err) = (0, 0);
        loop {
            let news =
                self.running.wait(deadline.saturating_duration_since(Instant::now()), |progress| {
                    let news = (
                        progress.stdout[passed_out..].to_vec(),
                        progress.stderr[passed_err..].to_vec(),
                    );
                    (progress.end.is_some() || !news.0.is_empty() || !news.1.is_empty())
                        .then_some(news)
                });
            let Some((stdout, stderr)) = news else { break };
            if stdout.is_empty() && stderr.is_empty() {
                break;
            }
            passed_out += stdout.len();
            passed_err += stderr.len();
            let passed = out
                .write_all(&stdout)
                .and_then(|()| out.flush())
                .and_then(|()| err.write_all(&stderr));
            if let Err(error) = passed {
                self.signal(Signal::TERM);
                return Err(error)
                    .context(format!("cannot forward the output of '{}'", self.command));
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        self.output(left).map(|output| output.code)
    }

    /// Waits until the command has ended.
    ///
    /// # Errors
    /// If the command does not end within `limit`, could not run, or its host is gone.
    pub fn output(&self, limit: Duration) -> Result<Output> {
        let end = self.running.wait(limit, |progress| progress.end.clone());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = {
            let progress = self.running.progress();
            (text(&progress.stdout), text(&progress.stderr))
        };
        match end {
            Some(End::Exit(code)) => Ok(Output { code, stdout, stderr }),
            Some(End::Failed(why)) => bail!(self.failure(&format!("was not run: {why}"))),
            Some(End::Gone) => bail!(self.failure("had not ended when the host stopped")),
            None => Err(self.too_late("has not ended", limit)),
        }
    }

    /// Waits for the end of a command that must exit with 0; returns its raw standard output.
    ///
    /// # Errors
    /// As [`Self::output`], and if the command exits with another code.
    pub(crate) fn bytes(&self, limit: Duration) -> Result<Vec<u8>> {
        let Output { code, stdout, stderr } = self.output(limit)?;
        if code != 0 {
            bail!(self.failure(&format!("ended with {code}:\n{stdout}{stderr}")));
        }
        Ok(std::mem::take(&mut self.running.progress().stdout))
    }

    fn too_late(&self, what: &str, limit: Duration) -> anyhow::Error {
        if !limit.is_zero() {
            self.console.ask();
        }
        let progress = self.running.progress();
        let said = [&progress.stdout[..], &progress.stderr].concat();
        self.failure(&format!("{what} within {limit:?}:\n{}", String::from_utf8_lossy(&said)))
    }

    fn failure(&self, what: &str) -> anyhow::Error {
        self.console.failure(format_args!("'{}' {what}", self.command))
    }
}
