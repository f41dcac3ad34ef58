//! A host of the demo: a network namespace, a cgroup and an agent.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_api::client::Client;
use aquifer_api::status::Status;
use aquifer_blockdev::process::client;
use aquifer_cli::cgroup::Cgroup;
use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_page::{Bytes, lock};
use rustix::process::{Pid, Signal, kill_process};

use super::{OVERLOAD, THRESHOLDS};
use crate::process::Site;
use crate::stores;

/// How long an agent may take to start, and to end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A host; its drop ends its agent and the processes in its cgroup.
#[derive(Debug)]
pub(super) struct Host {
    name: &'static str,
    dir: PathBuf,
    store: PathBuf,
    pid: Pid,
    /// Locked, as `try_wait` needs `&mut`.
    agent: Mutex<Child>,
    cgroup: Arc<Cgroup>,
}

impl Host {
    /// Starts the agent, which manages `cgroup`.
    pub(super) fn start(
        name: &'static str,
        site: &Site<'_>,
        cgroup: Cgroup,
        memory: Bytes,
    ) -> Result<Self> {
        let (dir, store) = (site.files(), site.store());
        let (upper, lower) = THRESHOLDS;
        let sections = format!(
            r#"[memory]
cgroup = "{cgroup}"
gate_swap = true
period = "100ms"
upper = {upper}
lower = {lower}
[borrow]
request = {request}
max = "16G"
spill = "{dir}/spill""#,
            cgroup = cgroup.path().display(),
            request = memory.scaled(OVERLOAD - 1.0 + 1.0 / 6.0).0,
            dir = dir.display(),
        );
        let mut command = site.agent(&sections)?;
        // On SIGINT an agent gives back the memory that it borrowed, so a killed demo leaves no
        // swap.
        aquifer_cli::sys::signal_with_parent(&mut command, Signal::INT);
        let agent = command.spawn().or_fail(|| format!("starting the agent of host {name}"))?;
        let pid = Pid::from_child(&agent);
        Ok(Self { name, dir, store, pid, agent: Mutex::new(agent), cgroup: Arc::new(cgroup) })
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn cgroup(&self) -> &Arc<Cgroup> {
        &self.cgroup
    }

    /// Returns a client of its agent.
    pub(super) fn client(&self) -> Client {
        Client::local(&self.dir.join("agent.sock")).with_timeout(Duration::from_secs(5))
    }

    /// Returns the directory of the agent's and volumes' files.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the directory of its lent pages.
    pub(super) fn store(&self) -> &Path {
        &self.store
    }

    /// Returns the process id of its agent.
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    pub(super) fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.or_fail(|| "calling an agent")?;
        loop {
            self.is_alive()?;
            match runtime.block_on(self.client().get::<Status>(aquifer_api::path::STATUS)) {
                // The first reading is there, so the agent knows its host's memory.
                Ok(status) if status.memory.total > Bytes::ZERO => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    return Err(self.failure(&error.to_string()));
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// # Errors
    /// If the agent has ended.
    pub(super) fn is_alive(&self) -> Result<()> {
        let mut agent = lock(&self.agent);
        match agent.try_wait() {
            Ok(Some(status)) => {
                Err(self.failure(&format!("it ended with {status}\n{}", self.last_words())))
            }
            _ => Ok(()),
        }
    }

    fn failure(&self, why: &str) -> Failure {
        Failure::new(format!("running the agent of host {}", self.name), why)
    }

    /// Returns the last lines of the agent's log, and of its volumes' logs.
    pub(super) fn last_words(&self) -> String {
        let mut words = String::new();
        let volumes = fs::read_dir(self.dir.join("volumes"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path());
        let logs =
            volumes.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        for log in [self.dir.join("agent.log")].into_iter().chain(logs) {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            let _ = write!(words, "\n{}, {}:", self.name, log.display());
            for line in &lines[lines.len().saturating_sub(12)..] {
                let _ = write!(words, "\n    {line}");
            }
        }
        words
    }

    /// Sends SIGINT and waits until the agent has given back borrowed memory and ended.
    pub(super) fn end(self) -> Result<()> {
        let _ = kill_process(self.pid, Signal::INT);
        let deadline = Instant::now() + TIMEOUT;
        while self.is_alive().is_ok() {
            if Instant::now() > deadline {
                return Err(self.failure(&format!("it does not end\n{}", self.last_words())));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The load first: its swapped pages then need not be read back.
        let _ = self.cgroup.kill_all();
        let agent = self.agent.get_mut().unwrap_or_else(PoisonError::into_inner);
        if matches!(agent.try_wait(), Ok(None)) {
            let _ = kill_process(self.pid, Signal::INT);
            let deadline = Instant::now() + TIMEOUT;
            while matches!(agent.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = agent.kill();
            let _ = agent.wait();
        }
        end_volumes(&self.dir);
        let _ = fs::remove_dir_all(&self.store);
        if let Some(stores) = self.store.parent() {
            let _ = fs::remove_dir(stores);
        }
    }
}

/// Detaches the volumes that an agent left.
fn end_volumes(dir: &Path) {
    if let Ok(volumes) = client::list(dir) {
        for volume in volumes {
            // A living volume swaps its pages back first. The load is dead, so there are few.
            let _ = client::detach(dir, volume, |_| ()).or_else(|_| client::clean_up(dir, volume));
        }
    }
}

/// Removes the remains of a killed demo's hosts; their agents have ended with it.
pub(super) fn clean_up(dir: &Path) {
    for name in ["a", "b"] {
        end_volumes(&dir.join(name));
    }
    let _ = fs::remove_dir_all(stores(dir));
}

/// Returns the RAM that the pages in a store take.
pub(super) fn stored(store: &Path) -> Bytes {
    let files = fs::read_dir(store).into_iter().flatten().flatten().map(|entry| entry.path());
    let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "pages"));
    // stat(2) counts blocks of 512 bytes.
    Bytes(pages.filter_map(|path| fs::metadata(path).ok()).map(|pages| pages.blocks() * 512).sum())
}
