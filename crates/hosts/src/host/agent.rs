//! The process of a host's agent: its start, its death, and its end.

use std::fs::{self, File};
use std::process::{Child, Command, ExitStatus};
use std::sync::MutexGuard;
use std::thread::sleep;
use std::time::{Duration, Instant};

use aquifer_api::client::Client;
use aquifer_api::path;
use aquifer_api::status::Status;
use aquifer_page::{Bytes, lock};
use rustix::process::{Pid, Signal, kill_process};

use super::Host;
use crate::error::{During as _, Error, Result};

/// How long an agent may take to end when its host is dropped.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Host {
    /// Returns a client of its agent.
    pub fn client(&self) -> Client {
        Client::local(&self.socket())
    }

    /// Returns the agent's status; `None` if it does not answer.
    pub fn try_status(&self) -> Option<Status> {
        block_on(self.client().get(path::STATUS)).ok()
    }

    /// Starts the agent, after `prepare` has changed its command.
    ///
    /// # Errors
    /// If it cannot be started, or if there is one whose end nobody has noticed.
    pub fn start(&self, prepare: impl FnOnce(&mut Command)) -> Result<()> {
        let what = || format!("starting the agent of host {}", self.name);
        fs::create_dir_all(self.state()).during(what)?;
        let log = File::options().create(true).append(true).open(self.log()).during(what)?;
        let mut command = self.aquifer.agent(&self.config());
        command.stdout(log.try_clone().during(what)?).stderr(log);
        prepare(&mut command);
        self.enter(&mut command)?;
        let mut agent = self.agent();
        if agent.is_some() {
            return Err(Error::new(what(), "it has one already"));
        }
        *agent = Some(command.spawn().during(what)?);
        Ok(())
    }

    fn agent(&self) -> MutexGuard<'_, Option<Child>> {
        lock(&self.agent)
    }

    /// Returns whether the agent answers and has its first reading of memory.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn is_ready(&self) -> Result<bool> {
        self.check()?;
        Ok(self.try_status().is_some_and(|status| status.memory.total > Bytes::ZERO))
    }

    /// Checks that the agent has not ended.
    ///
    /// # Errors
    /// If it has; the error has the last words of its log.
    pub fn check(&self) -> Result<()> {
        let end = match self.agent().as_mut().map(Child::try_wait) {
            Some(Ok(Some(status))) => format!("it ended with {status}"),
            None => "it was not started".to_owned(),
            _ => return Ok(()),
        };
        let why = format!("{end}\n{}", self.log_tails(12));
        Err(Error::new(format!("running the agent of host {}", self.name), why))
    }

    /// Returns the agent's process.
    pub fn pid(&self) -> Option<Pid> {
        self.agent().as_ref().map(Pid::from_child)
    }

    /// Sends a signal to the agent, unless it has ended.
    ///
    /// # Errors
    /// If there is none.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let what = || format!("sending a signal to the agent of host {}", self.name);
        let mut agent = self.agent();
        let agent = agent.as_mut().ok_or_else(|| Error::new(what(), "it was not started"))?;
        // Another process may have the number of one that has ended.
        match agent.try_wait().during(what)? {
            Some(_) => Ok(()),
            None => kill_process(Pid::from_child(agent), signal).during(what),
        }
    }

    /// Notices the agent's end; `None` while it runs.
    pub fn ended(&self) -> Option<ExitStatus> {
        let mut agent = self.agent();
        let status = agent.as_mut()?.try_wait().ok().flatten()?;
        *agent = None;
        Some(status)
    }

    /// Ends the agent, which gives back borrowed memory, and removes the pages that it holds.
    pub fn end(&self, timeout: Duration) {
        // On SIGINT, an agent that has only lent would wait until its borrowers, which may be gone,
        // have room elsewhere.
        let lends_only = self.try_status().is_none_or(|status| status.loans.borrowed.is_empty());
        if let Some(mut agent) = self.agent().take() {
            let pid = Pid::from_child(&agent);
            // A second signal ends an agent that waits for a borrower that is gone.
            for signal in [if lends_only { Signal::TERM } else { Signal::INT }, Signal::INT] {
                let running = |agent: &mut Child| matches!(agent.try_wait(), Ok(None));
                let asked = running(&mut agent) && kill_process(pid, signal).is_ok();
                let deadline = Instant::now() + timeout;
                while asked && running(&mut agent) && Instant::now() < deadline {
                    sleep(Duration::from_millis(10));
                }
            }
            let _ = agent.kill();
            let _ = agent.wait();
        }
        let _ = fs::remove_dir_all(&self.store);
        let _ = self.store.parent().map(fs::remove_dir);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end(TIMEOUT);
    }
}

/// Waits for the end of a call.
///
/// # Panics
/// If this process has no file descriptors left.
pub fn block_on<T>(call: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime needs a few file descriptors").block_on(call)
}
