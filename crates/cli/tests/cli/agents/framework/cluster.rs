//! A cluster on this machine, from nothing to nothing.

use std::fs::File;
use std::net::Ipv4Addr;
use std::ops::Index;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use tempfile::TempDir;

use super::{Host, Spec, Stranger};

/// Some hosts that `aquifer init` admitted. Dropping it ends them and removes all that they had.
pub struct Cluster {
    // In this order: hosts go first, the right to swap last.
    hosts: Vec<Host>,
    dir: TempDir,
    swap: Option<File>,
}

impl Cluster {
    /// Hosts whose agents run. Their tests do not swap; those of [`Cluster::that_swaps`] may.
    pub fn new<S: Into<Spec>>(specs: impl IntoIterator<Item = S>) -> Self {
        let cluster = Self::admitted(specs);
        cluster.start();
        cluster
    }

    /// The same, with the right to swap: one such cluster runs at a time.
    pub fn that_swaps<S: Into<Spec>>(specs: impl IntoIterator<Item = S>) -> Self {
        let swap = super::the_kernels_swap();
        let mut cluster = Self::admitted(specs);
        cluster.swap = Some(swap);
        cluster.start();
        cluster
    }

    /// Hosts that are admitted, whose agents do not run yet.
    pub fn admitted<S: Into<Spec>>(specs: impl IntoIterator<Item = S>) -> Self {
        let specs: Vec<(Spec, Ipv4Addr)> =
            specs.into_iter().map(|spec| (spec.into(), address())).collect();
        let dir = tempfile::Builder::new().prefix("aquifer-test-").tempdir().unwrap();
        init(dir.path(), specs.iter().map(|(spec, address)| (spec.name, *address)));
        let hosts =
            specs.iter().map(|(spec, address)| Host::new(spec, *address, dir.path())).collect();
        Self { hosts, dir, swap: None }
    }

    fn start(&self) {
        self.hosts.iter().for_each(Host::start);
        self.hosts.iter().for_each(Host::wait_until_ready);
    }

    /// Where everything of the cluster is but the pages.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Admits another host, of which the others are not told; gives its certificate.
    pub fn admit(&self, name: &str) -> PathBuf {
        init(self.dir(), [(name, address())]);
        self.dir().join(name).join("tls")
    }

    /// One who has no certificate of this cluster, only the authority's, which is public.
    pub fn stranger(&self) -> Stranger {
        Stranger::new(&self.dir().join("ca.pem"))
    }
}

impl Index<&str> for Cluster {
    type Output = Host;

    fn index(&self, name: &str) -> &Host {
        self.hosts.iter().find(|host| host.name() == name).unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.hosts.iter().for_each(Host::show_logs);
        }
        // All loads first: what they have swapped out then need not be moved, wherever it is.
        self.hosts.iter().for_each(Host::end_loads);
        // Borrowers before lenders, so that each can give back; one that only lends is soon done.
        self.hosts.iter().for_each(Host::end);
    }
}

/// Has `aquifer init` admit hosts.
pub fn init<'a>(dir: &Path, hosts: impl IntoIterator<Item = (&'a str, Ipv4Addr)>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
    command.arg("init").arg("--dir").arg(dir);
    for (name, address) in hosts {
        command.args(["--host", name, "--address", &address.to_string()]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// An address on loopback that no other host has: of this test program, or of another that runs beside it.
pub fn address() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let own = NEXT.fetch_add(1, Ordering::Relaxed);
    assert_ne!(own, u8::MAX, "no address left");
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high | 0x80, low, own)
}
