//! A cluster on this machine, which leaves nothing behind.

use std::fs::File;
use std::net::Ipv4Addr;
use std::ops::Index;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

use tempfile::TempDir;

use super::{Answer, Host, Spec, Stranger};
use crate::common::binary;

/// Some hosts that `aquifer cluster init` admitted; their drop ends them and removes all their
/// files.
pub struct Cluster {
    // Dropped in this order: hosts first, the right to swap last.
    hosts: Vec<Host>,
    dir: TempDir,
    swap: Option<File>,
    /// Admits hosts to a cluster of hosts that joined.
    token: Option<String>,
}

impl Cluster {
    /// Starts hosts with their agents; only tests with [`Cluster::that_swaps`] may swap.
    pub fn new<S: Into<Spec>>(specs: impl IntoIterator<Item = S>) -> Self {
        let cluster = Self::admitted(specs);
        cluster.start();
        cluster
    }

    /// Starts hosts with the right to swap: one such cluster runs at a time.
    pub fn that_swaps<S: Into<Spec>>(specs: impl IntoIterator<Item = S>) -> Self {
        let swap = super::the_kernels_swap();
        let mut cluster = Self::admitted(specs);
        cluster.swap = Some(swap);
        cluster.start();
        cluster
    }

    /// Admits hosts, but does not start their agents.
    pub fn admitted<S: Into<Spec>>(specs: impl IntoIterator<Item = S>) -> Self {
        let specs: Vec<(Spec, Ipv4Addr)> =
            specs.into_iter().map(|spec| (spec.into(), address())).collect();
        let dir = directory();
        let stores = stores(&dir);
        let members: Vec<_> = specs.iter().map(|(spec, address)| (spec.name, *address)).collect();
        let hosts = aquifer_hosts::Host::admit(&binary(), dir.path(), &stores, &members).unwrap();
        let hosts =
            specs.iter().zip(hosts).map(|((spec, _), host)| Host::new(spec, host)).collect();
        Self { hosts, dir, swap: None, token: None }
    }

    /// Starts the first host of a cluster that others can [`join`](Self::join).
    pub fn created(spec: impl Into<Spec>) -> Self {
        let (spec, dir) = (spec.into(), directory());
        let member = (spec.name, address());
        let made = aquifer_hosts::Host::create(&binary(), dir.path(), &stores(&dir), member);
        let (host, token) = made.unwrap();
        let hosts = vec![Host::new(&spec, host)];
        let cluster = Self { hosts, dir, swap: None, token: Some(token) };
        cluster.start();
        cluster
    }

    /// Gives the right to swap to a cluster: one such cluster runs at a time.
    pub fn with_swap(mut self) -> Self {
        self.swap = Some(super::the_kernels_swap());
        self
    }

    /// Joins a host through the first one, and starts its agent.
    pub fn join(&mut self, spec: impl Into<Spec>) {
        let spec = spec.into();
        let signer = (&**self.hosts.first().unwrap(), self.token());
        let (dir, stores) = (self.dir(), stores(&self.dir));
        let member = (spec.name, address());
        let host = aquifer_hosts::Host::join(&binary(), dir, &stores, member, signer).unwrap();
        self.hosts.push(Host::new(&spec, host));
        let host = self.hosts.last().unwrap();
        host.start();
        host.wait_until_ready();
    }

    /// Removes a host with all its files.
    pub fn forget(&mut self, name: &str) {
        let dir = self[name].dir().to_owned();
        self.hosts.retain(|host| host.name() != name);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Returns a host, if the cluster has it.
    pub fn find(&self, name: &str) -> Option<&Host> {
        self.hosts.iter().find(|host| host.name() == name)
    }

    /// Returns the token of a cluster that was [`created`](Self::created).
    pub fn token(&self) -> &str {
        self.token.as_deref().unwrap()
    }

    /// Makes another token, for hosts that [`join`](Self::join) from now on.
    pub fn make_token(&mut self) {
        let signer = self.hosts.first().unwrap();
        let mut token = signer.aquifer(&["cluster", "token", "--json", "--config"]);
        let made: serde_json::Value = Answer::of(token.arg(signer.config())).json();
        self.token = made["token"].as_str().map(str::to_owned);
    }

    fn start(&self) {
        self.hosts.iter().for_each(Host::start);
        self.hosts.iter().for_each(Host::wait_until_ready);
    }

    /// Returns the directory of all files of the cluster except pages.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Admits another host without the others' knowledge; returns the directory of its certificate.
    pub fn admit(&self, name: &str) -> PathBuf {
        init(self.dir(), [(name, address())]);
        self.dir().join(name).join("tls")
    }

    /// Returns a peer without a certificate of this cluster; it has the authority's public one
    /// only.
    pub fn stranger(&self) -> Stranger {
        Stranger::new(&self.dir().join("ca.pem"))
    }
}

impl Index<&str> for Cluster {
    type Output = Host;

    fn index(&self, name: &str) -> &Host {
        self.find(name).unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.hosts.iter().for_each(|host| eprintln!("{}", host.log_tails(40)));
        }
        // All loads first: their swapped pages then need not move, wherever they are.
        self.hosts.iter().for_each(Host::end_loads);
        // Tests list borrowers first, so that each can give back while its lenders live.
        self.hosts.iter().for_each(Host::end);
    }
}

fn directory() -> TempDir {
    tempfile::Builder::new().prefix("aquifer-test-").tempdir().unwrap()
}

fn stores(dir: &TempDir) -> PathBuf {
    Path::new("/dev/shm/aquifer").join(dir.path().file_name().unwrap())
}

/// Admits hosts by `aquifer cluster init`.
pub fn init<'a>(dir: &Path, hosts: impl IntoIterator<Item = (&'a str, Ipv4Addr)>) {
    binary().init(dir, hosts).unwrap();
}

/// Returns a loopback address that no other host of this or another running test program has.
pub fn address() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let own = NEXT.fetch_add(1, Ordering::Relaxed);
    assert_ne!(own, u8::MAX, "all loopback addresses are in use");
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high | 0x80, low, own)
}
