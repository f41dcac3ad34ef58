//! The network of two hosts on one machine: two network namespaces, joined by a veth pair.

use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::error::{During as _, Error, Result};

/// The directory in which ip(8) keeps named network namespaces.
const NAMESPACES: &str = "/run/netns";

/// The addresses of the two ends. All networks can use the same: no route leads out of the
/// namespaces.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];

/// Two namespaces joined by a veth pair; its drop removes them and the pair, unless a host is left.
#[derive(Debug)]
pub struct Network {
    hosts: [Arc<Namespace>; 2],
}

impl Network {
    /// Makes the namespaces `aquifer-NAME-a` and `aquifer-NAME-b`, each with loopback and one end
    /// of the veth pair.
    ///
    /// # Errors
    /// If ip(8) is not installed or refuses; it takes root.
    pub fn create(name: &str) -> Result<Self> {
        let make = |suffix, address| Namespace::create(named(name, suffix), address).map(Arc::new);
        let [a, b] = ADDRESSES;
        // If a step fails, the drop of the namespaces removes them.
        let network = Self { hosts: [make('a', a)?, make('b', b)?] };
        let [a, b] = &network.hosts;
        // Made inside one of them: the caller's namespace may have a link of that name.
        ip(&[
            "-n", &a.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns",
            &b.name,
        ])?;
        network.hosts.iter().try_for_each(|host| host.configure())?;
        Ok(network)
    }

    /// Returns the two hosts' namespaces.
    pub fn hosts(&self) -> &[Arc<Namespace>; 2] {
        &self.hosts
    }

    /// Removes the namespaces that a dead process's [`Network::create`] left.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub fn clean_up(name: &str) -> Result<()> {
        for suffix in ['a', 'b'] {
            delete(&named(name, suffix))?;
        }
        Ok(())
    }

    /// Mends the pair if `connected`, else cuts it.
    ///
    /// # Errors
    /// If ip(8) refuses.
    pub fn connect(&self, connected: bool) -> Result<()> {
        let [a, _] = &self.hosts;
        ip(&["-n", &a.name, "link", "set", "eth0", if connected { "up" } else { "down" }])
    }
}

pub(crate) fn named(network: &str, suffix: impl Display) -> String {
    format!("aquifer-{network}-{suffix}")
}

/// Removes a namespace, unless it is gone.
pub(crate) fn delete(name: &str) -> Result<()> {
    if Path::new(NAMESPACES).join(name).exists() { ip(&["netns", "delete", name]) } else { Ok(()) }
}

/// One host's network.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    address: Ipv4Addr,
}

impl Namespace {
    pub(crate) fn create(name: String, address: Ipv4Addr) -> Result<Self> {
        ip(&["netns", "add", &name])?;
        Ok(Self { name, address })
    }

    pub(crate) fn configure(&self) -> Result<()> {
        let address = format!("{}/24", self.address);
        ip(&["-n", &self.name, "address", "add", &address, "dev", "eth0"])?;
        ip(&["-n", &self.name, "link", "set", "lo", "up"])?;
        ip(&["-n", &self.name, "link", "set", "eth0", "up"])
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns its address on the network.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns the file that stands for the namespace.
    pub fn path(&self) -> PathBuf {
        Path::new(NAMESPACES).join(&self.name)
    }

    /// Makes `command` start in this network; its files and processes stay those of the machine.
    ///
    /// # Errors
    /// If the namespace is gone.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let file =
            File::open(self.path()).during(|| format!("opening {}", self.path().display()))?;
        crate::sys::start_in_network(command, file.into());
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A drop cannot report. `Network::clean_up` removes the rest.
        if ip(&["netns", "delete", &self.name]).is_err() {
            let _ = fs::remove_file(self.path());
        }
    }
}

pub(crate) fn ip(words: &[&str]) -> Result<()> {
    let what = || format!("running 'ip {}'", words.join(" "));
    let output = Command::new("ip").args(words).output().map_err(|error| {
        let help = (error.kind() == io::ErrorKind::NotFound).then_some("install iproute2");
        Error { help, ..Error::new(what(), error) }
    })?;
    if output.status.success() {
        return Ok(());
    }
    let help = (!rustix::process::geteuid().is_root()).then_some("run as root");
    Err(Error { help, ..Error::new(what(), String::from_utf8_lossy(&output.stderr).trim()) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

    use super::*;

    fn skipped() -> bool {
        let skipped =
            !rustix::process::geteuid().is_root() || Command::new("ip").arg("-V").output().is_err();
        if skipped {
            eprintln!("skipped: needs root and ip(8)");
        }
        skipped
    }

    /// Returns a name of the test's own.
    fn own(kind: &str) -> String {
        format!("{kind}-{}", std::process::id())
    }

    #[test]
    fn the_two_hosts_reach_each_other() {
        if skipped() {
            return;
        }
        let network = Network::create(&own("test-reach")).unwrap();
        let [a, b] = network.hosts();
        let mut inside = Command::new("ip");
        a.enter(inside.args(["-brief", "address", "show", "eth0"])).unwrap();
        let shown = String::from_utf8(inside.output().unwrap().stdout).unwrap();
        assert!(shown.contains("10.0.0.1/24"), "{shown}");

        let listener = within(b, || TcpListener::bind((ADDRESSES[1], 0)).unwrap());
        let target = listener.local_addr().unwrap();
        let (mut sent, (mut received, from)) = std::thread::scope(|scope| {
            let client = scope.spawn(|| within(a, || TcpStream::connect(target).unwrap()));
            let accepted = listener.accept().unwrap();
            (client.join().unwrap(), accepted)
        });
        assert_eq!(from.ip(), ADDRESSES[0]);
        sent.write_all(b"x").unwrap();
        assert_eq!(received.read(&mut [0]).unwrap(), 1);
    }

    /// Runs `what` on a thread that is in a namespace.
    fn within<T: Send>(namespace: &Namespace, what: impl FnOnce() -> T + Send) -> T {
        let file = File::open(namespace.path()).unwrap();
        let there = move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            what()
        };
        std::thread::scope(|scope| scope.spawn(there).join().unwrap())
    }

    #[test]
    fn the_machine_may_have_a_link_of_the_same_name() {
        if skipped() {
            return;
        }
        let machine = Network::create(&own("test-eth0")).unwrap();
        // The machine here is a host of another network: its only link is eth0.
        within(&machine.hosts()[0], || {
            Network::create(&own("test-inner")).map(drop).unwrap();
        });
    }

    #[test]
    fn nothing_is_left_of_a_dropped_network() {
        if skipped() {
            return;
        }
        let network = Network::create(&own("test-drop")).unwrap();
        let paths = network.hosts().each_ref().map(|host| host.path());
        assert!(paths.iter().all(|path| path.exists()));
        drop(network);
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn remains_of_a_dead_process_are_removed() {
        if skipped() {
            return;
        }
        let name = own("test-dead");
        let network = Network::create(&name).unwrap();
        let paths = network.hosts().each_ref().map(|host| host.path());
        std::mem::forget(network);
        Network::clean_up(&name).unwrap();
        assert!(paths.iter().all(|path| !path.exists()));
        Network::clean_up(&name).unwrap();
    }
}
