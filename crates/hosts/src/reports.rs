//! A process that reports events and may take orders.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{During as _, Error, Result};

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
