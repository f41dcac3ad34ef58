//! The network of several hosts on one machine: a network namespace each, joined by a bridge.

use std::net::Ipv4Addr;
use std::sync::Arc;

use crate::error::Result;
use crate::network::{Namespace, delete, ip, named};

/// The suffix of the namespace that holds the bridge.
const SWITCH: &str = "switch";

/// Namespaces on one bridge; its drop removes all of them, unless a host is left.
#[derive(Debug)]
pub struct Switched {
    hosts: Vec<Arc<Namespace>>,
    /// The bridge has a namespace of its own, so that this machine's network stays as it is.
    _switch: Namespace,
}

impl Switched {
    /// Makes the namespace `aquifer-NAME-HOST` for each host, with loopback and one port of the
    /// bridge. The first host's address is 10.0.0.1, the next one's 10.0.0.2.
    ///
    /// # Errors
    /// If ip(8) is not installed or refuses; it takes root.
    pub fn create(name: &str, hosts: &[&str]) -> Result<Self> {
        let switch = Namespace::create(named(name, SWITCH), Ipv4Addr::UNSPECIFIED)?;
        ip(&["-n", switch.name(), "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", switch.name(), "link", "set", "br0", "up"])?;
        // If a step fails, the drop of the namespaces removes them.
        let hosts = (1..).zip(hosts).map(|(number, host)| {
            let host = Namespace::create(named(name, host), Ipv4Addr::new(10, 0, 0, number))?;
            let port = format!("port{number}");
            let (to, of) = (switch.name(), host.name());
            ip(&[
                "-n", of, "link", "add", "eth0", "type", "veth", "peer", "name", &port, "netns", to,
            ])?;
            ip(&["-n", to, "link", "set", &port, "master", "br0", "up"])?;
            host.configure()?;
            Ok(Arc::new(host))
        });
        Ok(Self { hosts: hosts.collect::<Result<_>>()?, _switch: switch })
    }

    /// Returns the hosts' namespaces.
    pub fn hosts(&self) -> &[Arc<Namespace>] {
        &self.hosts
    }

    /// Removes the namespaces that a dead process's [`Switched::create`] left.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub fn clean_up(name: &str, hosts: &[&str]) -> Result<()> {
        hosts.iter().chain([&SWITCH]).try_for_each(|suffix| delete(&named(name, suffix)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    const HOSTS: [&str; 3] = ["a", "b", "c"];

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

    fn paths(network: &Switched) -> Vec<PathBuf> {
        let hosts = network.hosts.iter().map(|host| host.path());
        hosts.chain([network._switch.path()]).collect()
    }

    #[test]
    fn each_host_reaches_each_other_one() {
        if skipped() {
            return;
        }
        let network = Switched::create(&own("test-bridge"), &HOSTS).unwrap();
        for from in network.hosts() {
            for to in network.hosts() {
                let mut command = Command::new("python3");
                command.args(["-c", REACH, &to.address().to_string()]);
                from.enter(&mut command).unwrap();
                let output = command.output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(said.contains("ConnectionRefusedError"), "{said}");
            }
        }
    }

    /// A host that is there refuses a connection to a port without a listener.
    const REACH: &str = "import socket, sys; socket.create_connection((sys.argv[1], 9), 30)";

    #[test]
    fn neither_a_drop_nor_a_clean_up_leaves_anything() {
        if skipped() {
            return;
        }
        let name = own("test-switch");
        let network = Switched::create(&name, &HOSTS).unwrap();
        let made = paths(&network);
        assert!(made.len() == 4 && made.iter().all(|path| path.exists()));
        drop(network);
        assert!(made.iter().all(|path| !path.exists()));
        std::mem::forget(Switched::create(&name, &HOSTS).unwrap());
        Switched::clean_up(&name, &HOSTS).unwrap();
        assert!(made.iter().all(|path| !path.exists()));
        Switched::clean_up(&name, &HOSTS).unwrap();
    }
}
