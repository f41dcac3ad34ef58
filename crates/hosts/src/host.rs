//! A host: its files, and its agent's configuration, process and end.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use aquifer_api::client::Client;
use aquifer_api::path;
use aquifer_api::status::Status;
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use toml::Table;

use crate::daemon::Binary;
use crate::error::{During as _, Error, Result};
use crate::network::{Namespace, Network};

/// How long an agent may take to end when its host is dropped.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A host; its drop ends its agent and removes its pages.
#[derive(Debug)]
pub struct Host {
    name: &'static str,
    address: Ipv4Addr,
    aquifer: Binary,
    dir: PathBuf,
    store: PathBuf,
    /// The network namespace; `None` for that of this process.
    network: Option<Arc<Namespace>>,
    agent: Mutex<Option<Child>>,
}

impl Host {
    /// Admits hosts to the cluster in `dir`, but does not start their agents. Their pages lie below
    /// `stores`.
    ///
    /// # Errors
    /// If `aquifer init` fails.
    pub fn admit(
        aquifer: &Binary,
        dir: &Path,
        stores: &Path,
        members: &[(&'static str, Ipv4Addr)],
    ) -> Result<Vec<Self>> {
        aquifer.init(dir, members.iter().copied())?;
        let host = |&(name, address): &(&'static str, Ipv4Addr)| {
            let (dir, store) = (dir.join(name), stores.join(name));
            let (aquifer, agent) = (aquifer.clone(), Mutex::new(None));
            let host = Self { name, address, aquifer, dir, store, network: None, agent };
            host.configure(|_| ()).map(|()| host)
        };
        members.iter().map(host).collect()
    }

    /// Admits the hosts `a` and `b`, as [`Host::admit`] does, each with its own network.
    ///
    /// # Errors
    /// If `aquifer init` fails.
    pub fn admit_to(
        network: &Network,
        aquifer: &Binary,
        dir: &Path,
        stores: &Path,
    ) -> Result<Vec<Self>> {
        let [a, b] = network.hosts();
        let members = [("a", a.address()), ("b", b.address())];
        let mut hosts = Self::admit(aquifer, dir, stores, &members)?;
        for (host, namespace) in hosts.iter_mut().zip([a, b]) {
            host.network = Some(namespace.clone());
        }
        Ok(hosts)
    }

    /// Changes the configuration that `aquifer init` wrote; the agent reads it at its next start.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn configure(&self, change: impl FnOnce(&mut Table)) -> Result<()> {
        let what = || format!("configuring the agent of host {}", self.name);
        let text = fs::read_to_string(self.config()).during(what)?;
        let mut config: Table = text.parse().during(what)?;
        for (key, path) in [
            ("tls", self.tls()),
            ("socket", self.socket()),
            ("state", self.state()),
            ("store", self.store.clone()),
        ] {
            config.insert(key.to_owned(), path.display().to_string().into());
        }
        change(&mut config);
        fs::write(self.config(), config.to_string()).during(what)
    }

    /// Adds sections to the configuration, in place of those of these names.
    ///
    /// # Errors
    /// If they are not TOML, or as [`Host::configure`].
    pub fn set(&self, sections: &str) -> Result<()> {
        let what = || format!("configuring the agent of host {}", self.name);
        let sections: Table = sections.parse().during(what)?;
        self.configure(|config| config.extend(sections))
    }

    /// Returns its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the address of its agent for peers.
    pub fn api(&self) -> SocketAddr {
        (self.address, 7070).into()
    }

    /// Returns the address of its pages for borrowers.
    pub fn pages(&self) -> SocketAddr {
        (self.address, 7071).into()
    }

    /// Returns the directory of its files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the file of its agent's configuration.
    pub fn config(&self) -> PathBuf {
        self.dir.join("agent.toml")
    }

    /// Returns the directory of its certificate.
    pub fn tls(&self) -> PathBuf {
        self.dir.join("tls")
    }

    /// Returns the directory of its sockets and logs.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Returns the socket of its agent.
    pub fn socket(&self) -> PathBuf {
        self.state().join("agent.sock")
    }

    /// Returns the directory of the pages that it holds for others.
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// Returns the command `aquifer` on this host.
    ///
    /// # Errors
    /// If its network namespace is gone.
    pub fn command(&self) -> Result<Command> {
        let mut command = self.aquifer.command(&self.state());
        command.env("AQUIFER_SOCKET", self.socket());
        self.enter(&mut command)?;
        Ok(command)
    }

    fn enter(&self, command: &mut Command) -> Result<()> {
        self.network.as_ref().map_or(Ok(()), |network| network.enter(command))
    }

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
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    /// Returns the log of all the host's agents.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Returns the last lines of the logs of the agent, and of its volumes, VMs and regions.
    pub fn log_tails(&self, lines: usize) -> String {
        let state = self.state();
        let entries = |of: &str| {
            let entries = fs::read_dir(state.join(of)).into_iter().flatten().flatten();
            entries.map(|entry| entry.path())
        };
        let volumes =
            entries("volumes").filter(|path| path.extension().is_some_and(|e| e == "log"));
        let guests = entries("vms").chain(entries("regions")).map(|dir| dir.join("log"));
        let mut tails = String::new();
        for log in [self.log()].into_iter().chain(volumes).chain(guests) {
            let Ok(text) = fs::read_to_string(&log) else { continue };
            let all: Vec<_> = text.lines().collect();
            let _ = write!(tails, "\n{}, {}:", self.name, log.display());
            for line in &all[all.len().saturating_sub(lines)..] {
                let _ = write!(tails, "\n    {line}");
            }
        }
        tails
    }

    /// Ends the agent, which gives back borrowed memory, and removes the pages that it holds.
    pub fn end(&self, timeout: Duration) {
        // On SIGINT, an agent that has only lent would wait until its borrowers, which may be gone,
        // have room elsewhere.
        let lends_only = self.try_status().is_none_or(|status| status.borrowed.is_empty());
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

    /// Returns the RAM that those pages take, by the kernel's count.
    pub fn stored(&self) -> Bytes {
        stored(&self.store)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end(TIMEOUT);
    }
}

/// Returns the RAM that the pages in a store take.
pub fn stored(store: &Path) -> Bytes {
    let files = fs::read_dir(store).into_iter().flatten().flatten().map(|entry| entry.path());
    let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "pages"));
    // stat(2) counts blocks of 512 bytes.
    Bytes(pages.filter_map(|path| fs::metadata(path).ok()).map(|pages| pages.blocks() * 512).sum())
}

/// Waits for the end of a call.
///
/// # Panics
/// If this process has no file descriptors left.
pub fn block_on<T>(call: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime needs a few file descriptors").block_on(call)
}
