//! The demo's side of a load process, which ends in any case when the demo ends.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, Result};
use aquifer_cli::load::{Event, Plan, Verdict};
use aquifer_hosts::{Daemon, Error};
use rustix::process::Signal;

use super::program;

/// A running load; its drop kills it.
#[derive(Debug)]
pub struct Loader(Daemon<Event>);

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
        command.arg("--hold").stdin(Stdio::piped());
        prepare(&mut command)?;
        aquifer_cli::sys::signal_with_parent(&mut command, Signal::KILL);
        Daemon::start(&mut command).map(Self).map_err(died)
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
        self.0.order(order).map_err(died)
    }

    /// Lets the load quit, and waits for its end until `deadline`.
    ///
    /// # Errors
    /// If the load died before, or does not end in time.
    pub fn quit(mut self, deadline: Instant) -> Result<()> {
        self.order("quit")?;
        self.0.close();
        match self.wait(deadline, |_| None::<()>) {
            // The reports ended because the load did.
            Err(_) if self.0.ended_within(DYING).is_some_and(|status| status.success()) => Ok(()),
            Err(failure) => Err(failure),
            Ok(_) => Err(Failure::new("ending a load", "it goes on")),
        }
    }

    fn wait<T>(
        &mut self,
        deadline: Instant,
        wanted: impl Fn(Event) -> Option<T>,
    ) -> Result<Option<T>> {
        self.0.wait(deadline, wanted).map_err(died)
    }
}

/// How long a load may take to end after its last report.
const DYING: Duration = Duration::from_secs(60);

fn died(error: Error) -> Failure {
    Failure::new("running a load", error.why)
}
