//! The end of an agent by a signal. SIGINT first recalls lent memory and returns borrowed memory;
//! SIGTERM leaves both to the next agent.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aquifer_api::Problem;
use aquifer_api::order::{Drain, Draining, Left, Return};
use aquifer_page::{Bytes, HostName};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::driver::{Command, Handle};
use crate::{AgentError, start_error};

/// Interval between two looks at a drain.
const LOOK: Duration = Duration::from_millis(200);

/// Interval between two progress messages without news.
const TELL: Duration = Duration::from_secs(5);

/// Log line of an end by SIGTERM.
const LEFT_TO_NEXT_AGENT: &str = "stopping: leases and volumes stay in place for the next agent";

/// The signals that the agent handles.
pub(crate) struct Signals {
    interrupted: Signal,
    terminated: Signal,
    hung_up: Signal,
}

/// The signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    Interrupt,
    Terminate,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, AgentError> {
        let interrupted = signal(SignalKind::interrupt()).map_err(start_error)?;
        let terminated = signal(SignalKind::terminate()).map_err(start_error)?;
        let hung_up = signal(SignalKind::hangup()).map_err(start_error)?;
        Ok(Self { interrupted, terminated, hung_up })
    }

    async fn next(&mut self) -> Came {
        loop {
            tokio::select! {
                _ = self.terminated.recv() => return Came::Terminate,
                _ = self.interrupted.recv() => return Came::Interrupt,
                _ = self.hung_up.recv() => tracing::warn!(
                    "SIGHUP is ignored: an agent reads its configuration only when it starts. \
                     Restart it: SIGTERM leaves leases and volumes to the next agent"
                ),
            }
        }
    }

    /// Waits for a signal and obeys it; returns when the agent may end.
    ///
    /// # Errors
    /// If a second SIGINT forces the end while borrowers have pages here.
    pub(crate) async fn wait(&mut self, handle: &Handle) -> Result<(), AgentError> {
        match self.next().await {
            Came::Terminate => {
                tracing::info!("{LEFT_TO_NEXT_AGENT}");
                if let Ok(draining) = ask(handle, None).await {
                    draining.left.iter().for_each(wait_for_next_agent);
                }
                Ok(())
            }
            Came::Interrupt => match self.drain(handle).await? {
                true => {
                    let stopped = self.give_back(handle).await;
                    tracing::info!("stopping: {stopped}");
                    Ok(())
                }
                false => Ok(()),
            },
        }
    }

    /// Recalls all lent memory. Returns false if SIGTERM leaves the rest to the next agent.
    async fn drain(&mut self, handle: &Handle) -> Result<bool, AgentError> {
        let mut order = Some(Drain { on: true });
        let mut told: Option<(Instant, String)> = None;
        loop {
            let Ok(draining) = ask(handle, order.take()).await else { return Ok(true) };
            if draining.left.is_empty() {
                if told.is_some() {
                    tracing::info!("all leases are back");
                }
                return Ok(true);
            }
            if told.is_none() {
                tracing::info!(
                    "recalling all leases before stopping; interrupt again to stop at once, \
                     which loses the borrowers' pages"
                );
            }
            let progress = progress(&draining.left);
            if told
                .as_ref()
                .is_none_or(|(at, last)| at.elapsed() > TELL || reasons(last) != reasons(&progress))
            {
                tracing::info!("still lent: {progress}");
                told = Some((Instant::now(), progress));
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                came = self.next() => match came {
                    Came::Interrupt => {
                        draining.left.iter().for_each(lose);
                        return Err(AgentError::Forced(by_borrower(&draining.left)));
                    }
                    Came::Terminate => {
                        tracing::info!("{LEFT_TO_NEXT_AGENT}");
                        draining.left.iter().for_each(wait_for_next_agent);
                        return Ok(false);
                    }
                },
            }
        }
    }

    /// Returns borrowed memory; another signal leaves the rest to the next agent.
    async fn give_back(&mut self, handle: &Handle) -> &'static str {
        const STAYS: &str = "the remaining volumes stay in use for the next agent";
        tracing::info!("giving back all volumes; interrupt again to leave them to the next agent");
        let returned = handle.ask(|reply| Command::Return { order: Return::default(), reply });
        tokio::select! {
            returned = returned => match returned.and_then(|returned| returned) {
                Ok(_) => "all volumes are given back",
                Err(problem) => {
                    tracing::error!("cannot give back all volumes: {}", problem.error);
                    STAYS
                }
            },
            _ = self.next() => STAYS,
        }
    }
}

async fn ask(handle: &Handle, order: Option<Drain>) -> Result<Draining, Problem> {
    // VMs run on without an agent.
    handle.ask(|reply| Command::Drain { order, vms: false, reply }).await?
}

/// Describes the remaining leases in one line.
fn progress(left: &[Left]) -> String {
    let one = |left: &Left| {
        format!("{} in lease {} of {} ({})", left.bytes, left.lease, left.borrower, left.why)
    };
    left.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Strips the figures from a progress line; a change of the rest is news.
fn reasons(progress: &str) -> String {
    progress.chars().filter(|c| !c.is_ascii_digit() && *c != '.').collect()
}

fn by_borrower(left: &[Left]) -> String {
    let mut sums: BTreeMap<&HostName, Bytes> = BTreeMap::new();
    for Left { borrower, bytes, .. } in left {
        let sum = sums.entry(borrower).or_default();
        *sum = sum.saturating_add(*bytes);
    }
    sums.iter()
        .map(|(borrower, bytes)| format!("{bytes} of {borrower}"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn io_timeout(left: &Left) -> String {
    match left.io_timeout_ms {
        Some(millis) => {
            format!("for {}", humantime::format_duration(Duration::from_millis(millis)))
        }
        None => "for its [borrow] io_timeout".to_owned(),
    }
}

fn wait_for_next_agent(left: &Left) {
    let Left { borrower, bytes, lease, .. } = left;
    tracing::warn!(
        "{borrower} has {bytes} here in lease {lease}: its programs wait for the next agent {}, \
         then fail",
        io_timeout(left)
    );
}

fn lose(left: &Left) {
    let Left { borrower, bytes, lease, .. } = left;
    tracing::error!(
        "{borrower} loses {bytes} in lease {lease}, unless you start another agent: its programs \
         wait {}, then fail",
        io_timeout(left)
    );
}
