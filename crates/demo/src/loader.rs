//! The demo's side of a load process, which ends in any case when the demo ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::load::{Event, Plan, Verdict};

use super::program;

/// A running load; its drop kills it.
#[derive(Debug)]
pub struct Loader {
    child: Child,
    orders: Option<ChildStdin>,
    events: Receiver<Event>,
}

impl Loader {
    /// Starts a load that holds its memory. `prepare` may put the process into a cgroup or a
    /// network.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(plan: Plan, prepare: impl FnOnce(&mut Command) -> Result<()>) -> Result<Self> {
        let mut command = Command::new(program::aquifer()?);
        command
            .arg("load")
            .arg("--bytes")
            .arg(plan.bytes.0.to_string())
            .arg("--seed")
            .arg(plan.seed.to_string());
        if let Some(rate) = plan.rate {
            command.arg("--rate").arg(rate.0.to_string());
        }
        command.arg("--hold").stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::spawn(command, prepare)
    }

    fn spawn(
        mut command: Command,
        prepare: impl FnOnce(&mut Command) -> Result<()>,
    ) -> Result<Self> {
        prepare(&mut command)?;
        aquifer_cli::sys::signal_with_parent(&mut command, rustix::process::Signal::KILL);
        let mut child = command.spawn().or_fail(|| "starting a load")?;
        let orders = child.stdin.take();
        let (sender, events) = mpsc::channel();
        if let Some(reports) = child.stdout.take() {
            // The thread ends with the load, or when the receiver is gone.
            thread::spawn(move || {
                let events = BufReader::new(reports).lines().map_while(std::io::Result::ok);
                let mut events =
                    events.filter_map(|line| serde_json::from_str::<Event>(&line).ok());
                events.try_for_each(|event| sender.send(event))
            });
        }
        Ok(Self { child, orders, events })
    }

    /// Waits until all memory is filled; `None` if `deadline` passes first.
    ///
    /// # Errors
    /// If the load has died.
    pub fn filled(&mut self, deadline: Instant) -> Result<Option<u64>> {
        self.wait(deadline, |event| match event {
            Event::Filled { pages_written } => Some(pages_written),
            _ => None,
        })
    }

    /// Waits for the verdict of a verification that was ordered; `None` if `deadline` passes first.
    ///
    /// # Errors
    /// If the load has died.
    pub fn verified(&mut self, deadline: Instant) -> Result<Option<Verdict>> {
        self.wait(deadline, |event| match event {
            Event::Verified(verdict) => Some(verdict),
            _ => None,
        })
    }

    /// Sends a command: `verify`, `rewrite`, `free` or `quit`.
    ///
    /// # Errors
    /// If the load has died.
    pub fn order(&mut self, order: &str) -> Result<()> {
        let written = self
            .orders
            .as_mut()
            .map(|orders| writeln!(orders, "{order}").and_then(|()| orders.flush()));
        match written {
            Some(Ok(())) => Ok(()),
            _ => Err(self.died()),
        }
    }

    /// Lets the load quit, and waits for its end until `deadline`.
    ///
    /// # Errors
    /// If the load died before, or does not end in time.
    pub fn quit(mut self, deadline: Instant) -> Result<()> {
        self.order("quit")?;
        self.orders = None;
        match self.wait(deadline, |_| None::<()>) {
            // The reports ended because the load did.
            Err(_) if self.child.wait().is_ok_and(|status| status.success()) => Ok(()),
            Err(failure) => Err(failure),
            Ok(_) => Err(Failure::new("ending a load", "it goes on")),
        }
    }

    /// Waits for an event that `wanted` turns into a value.
    fn wait<T>(
        &mut self,
        deadline: Instant,
        wanted: impl Fn(Event) -> Option<T>,
    ) -> Result<Option<T>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(event) => {
                    if let Some(found) = wanted(event) {
                        return Ok(Some(found));
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
            }
        }
    }

    /// Returns the reason why there are no more reports.
    fn died(&mut self) -> Failure {
        let failure = |why: String| Failure::new("running a load", why);
        match wait_at_most(&mut self.child, Duration::from_secs(5)) {
            Some(status) => failure(format!("it ended with {status}")),
            None => failure("it stopped reporting".to_owned()),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // The load may have ended already. The wait is needed in any case: a zombie holds its
        // cgroup.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_at_most(child: &mut Child, limit: Duration) -> Option<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            _ => return None,
        }
    }
}
