//! A host of the demo: a network namespace, a cgroup, an agent.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_api::client::Client;
use aquifer_api::status::Status;
use aquifer_device::process::client;
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::{OVERLOAD, THRESHOLDS};
use crate::cgroup::Cgroup;
use crate::demo::process::Site;
use crate::demo::stores;
use crate::failure::{Failure, OrFail, Result};

/// How long an agent may take to start, and to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A host. Dropping it ends its agent and what runs in its cgroup.
#[derive(Debug)]
pub(super) struct Host {
    name: &'static str,
    dir: PathBuf,
    store: PathBuf,
    pid: Pid,
    /// Behind a lock because asking whether it lives takes it.
    agent: Mutex<Child>,
    cgroup: Arc<Cgroup>,
}

impl Host {
    /// Starts its agent, to manage `cgroup`.
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
        // An interrupted agent gives back what it borrowed, so a demo that is killed leaves no swap behind.
        crate::sys::signal_with_parent(&mut command, Signal::INT);
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

    /// The way to its agent.
    pub(super) fn client(&self) -> Client {
        Client::local(&self.dir.join("agent.sock")).with_timeout(Duration::from_secs(5))
    }

    /// Where its agent and volumes keep their files.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where its lent pages are.
    pub(super) fn store(&self) -> &Path {
        &self.store
    }

    /// Its agent's process.
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    pub(super) fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.or_fail(|| "calling an agent")?;
        loop {
            self.is_alive()?;
            match runtime.block_on(self.client().get::<Status>(aquifer_api::path::STATUS)) {
                // The first reading is there: from now on it knows what it has.
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
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// The last lines of the agent's log, and of its volumes'.
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

    /// Ends the agent in order, once it has given back what it may still have borrowed.
    pub(super) fn end(self) -> Result<()> {
        let _ = kill_process(self.pid, Signal::INT);
        let deadline = Instant::now() + PATIENCE;
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
        // The load first: what it has swapped out need not be read back then.
        let _ = self.cgroup.kill_all();
        let agent = self.agent.get_mut().unwrap_or_else(PoisonError::into_inner);
        if matches!(agent.try_wait(), Ok(None)) {
            let _ = kill_process(self.pid, Signal::INT);
            let deadline = Instant::now() + PATIENCE;
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

/// Ends volumes that an agent could not.
fn end_volumes(dir: &Path) {
    if let Ok(volumes) = client::list(dir) {
        for volume in volumes {
            // A living one first has to give back what it holds; nobody needs that any more, so it is quick.
            let _ = client::detach(dir, volume, |_| ()).or_else(|_| client::clean_up(dir, volume));
        }
    }
}

/// Removes what the hosts of a killed demo left; their agents have ended with it.
pub(super) fn clean_up(dir: &Path) {
    for name in ["a", "b"] {
        end_volumes(&dir.join(name));
    }
    let _ = fs::remove_dir_all(stores(dir));
}

/// RAM that the pages in a store take.
pub(super) fn stored(store: &Path) -> Bytes {
    let files = fs::read_dir(store).into_iter().flatten().flatten().map(|entry| entry.path());
    let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "pages"));
    // stat(2) counts blocks of 512 bytes.
    Bytes(pages.filter_map(|path| fs::metadata(path).ok()).map(|pages| pages.blocks() * 512).sum())
}
