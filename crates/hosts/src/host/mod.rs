//! A host: its files, its configuration, and the commands that an operator gives on it.

mod agent;

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use aquifer_page::Bytes;
use serde::Deserialize;
use serde_json::Value;
use toml::Table;

pub use agent::block_on;

use crate::daemon::{Binary, answer};
use crate::error::{During as _, Result};
use crate::network::{Namespace, Network};

/// The part of the answer of `aquifer cluster create` that is needed here.
#[derive(Deserialize)]
struct Made {
    token: String,
}

/// Where a host is: its name, its address, and its network.
#[derive(Clone, Debug)]
pub struct Place {
    name: &'static str,
    address: Ipv4Addr,
    network: Option<Arc<Namespace>>,
}

impl Place {
    /// Places a host in a network namespace.
    pub fn within(name: &'static str, network: &Arc<Namespace>) -> Self {
        Self { name, address: network.address(), network: Some(network.clone()) }
    }
}

impl From<(&'static str, Ipv4Addr)> for Place {
    /// Places a host in the network of this process.
    fn from((name, address): (&'static str, Ipv4Addr)) -> Self {
        Self { name, address, network: None }
    }
}

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
    /// If `aquifer cluster init` fails.
    pub fn admit(
        aquifer: &Binary,
        dir: &Path,
        stores: &Path,
        members: &[(&'static str, Ipv4Addr)],
    ) -> Result<Vec<Self>> {
        aquifer.init(dir, members.iter().copied())?;
        let host = |&(name, address): &(&'static str, Ipv4Addr)| {
            let host = Self::new(aquifer, dir, stores, (name, address).into());
            host.configure(|_| ()).map(|()| host)
        };
        members.iter().map(host).collect()
    }

    /// Creates a cluster whose first host this is; returns the host and a token, but does not start
    /// its agent.
    ///
    /// # Errors
    /// If `aquifer cluster create` fails.
    pub fn create(
        aquifer: &Binary,
        dir: &Path,
        stores: &Path,
        place: impl Into<Place>,
    ) -> Result<(Self, String)> {
        let host = Self::new(aquifer, dir, stores, place.into());
        let made: Made = answer(&mut host.to_belong(&["create"])?)?;
        host.configure(|_| ())?;
        Ok((host, made.token))
    }

    /// Joins a host to the cluster of `signer`, but does not start its agent.
    ///
    /// # Errors
    /// If `aquifer cluster join` fails.
    pub fn join(
        aquifer: &Binary,
        dir: &Path,
        stores: &Path,
        place: impl Into<Place>,
        (signer, token): (&Self, &str),
    ) -> Result<Self> {
        let host = Self::new(aquifer, dir, stores, place.into());
        let signer = signer.api().to_string();
        answer::<Value>(&mut host.to_belong(&["join", &signer, "--token", token])?)?;
        host.configure(|_| ())?;
        Ok(host)
    }

    fn new(aquifer: &Binary, dir: &Path, stores: &Path, place: Place) -> Self {
        let Place { name, address, network } = place;
        let (dir, store) = (dir.join(name), stores.join(name));
        let (aquifer, agent) = (aquifer.clone(), Mutex::new(None));
        Self { name, address, aquifer, dir, store, network, agent }
    }

    /// Returns the command `aquifer cluster VERB` on this host, with its name, address and files.
    fn to_belong(&self, verb: &[&str]) -> Result<Command> {
        let words: Vec<_> = ["cluster"].iter().chain(verb).copied().collect();
        let mut command = self.aquifer.json(&self.state(), &words);
        command.args(["--host", self.name, "--address", &self.address.to_string()]);
        command.arg("--config").arg(self.config()).arg("--cluster-dir").arg(self.cluster());
        self.enter(&mut command)?;
        Ok(command)
    }

    /// Returns the directory of what it knows of its cluster.
    pub fn cluster(&self) -> PathBuf {
        self.dir.join("cluster")
    }

    /// Admits the hosts `a` and `b`, as [`Host::admit`] does, each with its own network.
    ///
    /// # Errors
    /// If `aquifer cluster init` fails.
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

    /// Changes the configuration that `aquifer cluster init` wrote; the agent reads it at its next
    /// start.
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
        let definitions = self.definitions().display().to_string();
        let vms = config.entry("vms").or_insert_with(|| Table::new().into());
        vms.as_table_mut().map(|vms| vms.insert("dir".to_owned(), definitions.into()));
        let agreements = self.groups().display().to_string();
        let groups = config.entry("groups").or_insert_with(|| Table::new().into());
        groups.as_table_mut().map(|it| it.insert("agreements".to_owned(), agreements.into()));
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

    /// Returns the directory of the definitions of its VMs.
    pub fn definitions(&self) -> PathBuf {
        self.dir.join("definitions")
    }

    /// Returns the directory of the agreements of its groups.
    pub fn groups(&self) -> PathBuf {
        self.dir.join("groups")
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
        command.env("AQUIFER_SOCKET", self.socket()).env("AQUIFER_VM_DIR", self.definitions());
        command.env("AQUIFER_GROUPS", self.groups());
        self.enter(&mut command)?;
        Ok(command)
    }

    fn enter(&self, command: &mut Command) -> Result<()> {
        self.network.as_ref().map_or(Ok(()), |network| network.enter(command))
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

    /// Returns the RAM that those pages take, by the kernel's count.
    pub fn stored(&self) -> Bytes {
        stored(&self.store)
    }
}

/// Returns the RAM that the pages in a store take.
pub fn stored(store: &Path) -> Bytes {
    let files = fs::read_dir(store).into_iter().flatten().flatten().map(|entry| entry.path());
    let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "pages"));
    // stat(2) counts blocks of 512 bytes.
    Bytes(pages.filter_map(|path| fs::metadata(path).ok()).map(|pages| pages.blocks() * 512).sum())
}
