//! The commented configuration of a new host.

use aquifer_page::HostName;
use std::net::{IpAddr, SocketAddr};

use super::{Member, PAGES_PORT};

/// The port registered for NVMe over Fabrics.
const NVME_PORT: u16 = 4420;

/// Returns the text of `agent.toml` for a host, with its peers' sections at the end.
pub(super) fn config(member: &Member, peers: &str) -> String {
    let peers = format!("# The other hosts.\n{peers}");
    text(&member.name, member.ip, &peers)
}

/// Returns the text of `agent.toml` for a host of a cluster that needs no list of hosts, with these
/// keys in force.
pub(crate) fn of_cluster(host: &HostName, ip: IpAddr, keys: &[(&str, toml::Value)]) -> String {
    let peers = "# Hosts outside the cluster, if there are any.\n# [[peer]]\n# name = \"…\"\n\
                 # address = \"…\"\n";
    let text = text(host, ip, peers);
    let in_force = |line: &str| {
        let key = line.strip_prefix("# ").and_then(|line| line.split_once(" = "));
        let set = key.and_then(|(key, _)| keys.iter().find(|(name, _)| *name == key));
        set.map_or_else(|| line.to_owned(), |(key, value)| format!("{key} = {value}"))
    };
    text.lines().map(|line| in_force(line) + "\n").collect()
}

fn text(host: &HostName, ip: IpAddr, peers: &str) -> String {
    let listen = SocketAddr::from((ip, super::AGENT_PORT));
    let pages = SocketAddr::from((ip, PAGES_PORT));
    let nvme = SocketAddr::from((ip, NVME_PORT));
    format!(
        r#"# The agent of host {host}. Lines that are commented out show the defaults.
# Sizes: 4096, "512MiB", "2G". Times: "500ms", "8s", "10m".

# This host's name, as its certificate has it.
host = "{host}"
# The address for the other hosts' agents (HTTP over mutual TLS).
listen = "{listen}"
# The address at which borrowers reach their pages on this host (NBD over mutual TLS).
pages = "{pages}"
# The certificate, the key and the authority's certificate.
# tls = "/etc/aquifer/tls"
# What this host knows of its cluster ('aquifer cluster join').
# cluster = "/var/lib/aquifer/cluster"
# The socket for 'aquifer status' and 'aquifer host'.
# socket = "/run/aquifer/agent.sock"
# Control sockets and logs of volumes.
# state = "/run/aquifer"
# The tmpfs directory that holds lent pages. They outlive the agent.
# store = "/dev/shm/aquifer/{host}"
# The zone that this host is in, such as its rack: hosts of one zone may fail together.
# zone = "…"

[memory]
# Manage one memory cgroup, a path under /sys/fs/cgroup, instead of the whole host.
# cgroup = "/sys/fs/cgroup/…"
# Let that cgroup swap only while this agent swaps to a borrowed device.
# gate_swap = false
# Time between two checks of memory.
# period = "1s"
# Borrow when more than this share of memory is used ...
# upper = 0.8
# ... and return when use and borrowed swap together are below this share.
# lower = 0.6
# Also borrow when tasks wait for memory for more than this share of time (PSI); 0 turns it off.
# pressure = 0.1

[lend]
# enabled = true
# Memory reserved for this host's own programs. Without it, all unused memory can be lent.
# reserved = "4G"
# How long the lease of a silent borrower is kept.
# grace = "10m"
# Where lent pages are: in a "store" that the agent serves, or with "kernel" in zram devices that
# the kernel's own NVMe target serves.
# backend = "store"
# Also serve leases over NVMe/TCP at this address (the "kernel" backend needs it); that backend can
# serve over RDMA too. Only pages are encrypted, and not those of hosts that attach "direct":
# use it on trusted networks.
# nvme = "{nvme}"
# rdma = false
# Borrowers authenticate with a secret for each lease (DH-HMAC-CHAP); some kernels cannot.
# secrets = true
# The part of the link's speed for lending while this host's own programs use the link.
# network_share = 0.8

# What one borrower may use; without these, hosts take turns only when this host is saturated.
[lend.limits]
# Bytes and requests a second, and connections, of a host in all its leases ...
# host_bytes = "500M"
# host_requests = 100000
# host_connections = 512
# ... and of one lease.
# lease_bytes = "200M"
# lease_requests = 50000
# lease_connections = 256

[borrow]
# Borrow automatically; 'aquifer host borrow' always works.
# enabled = true
# Memory to ask for at a time ...
# request = "1G"
# ... and the most to borrow in all.
# max = "16G"
# The tenant to whom lenders account the leases.
# group = "default"
# The directory of a local file for pages that a lender recalls when no other lender has room.
# spill = "/var/lib/aquifer/spill"
# How old the key of a lease gets: then another lease with a new key replaces it ("never": not).
# key_lifetime = "30d"
# How long I/O waits for a silent lender.
# io_timeout = "8s"
# Swap to a "pool" volume over any number of leases, or "direct" to one lender with the kernel's
# own NVMe initiator.
# attach = "pool"
# The protocol: "nbd" (over mutual TLS), "nvme-tcp" (only pages are encrypted), or "nvme-rdma"
# (direct only, not encrypted).
# protocol = "nbd"
# The block device driver of volumes: auto, ublk, nbd or fuse-loop.
# backend = "auto"
# Swap priority of borrowed devices; -1 leaves it to the kernel.
# priority = 100

[vms]
# Accept VMs that other hosts migrate here ('aquifer vm migrate'). Their QEMU arguments come from
# those hosts, so accept only trusted peers.
# accept = false
# The QEMU program.
# qemu = "qemu-system-x86_64"

[groups]
# Hand out the memory that sharing saves to the groups' VMs ('aquifer serve reprovision').
# balance = false
# The directory of the groups' files.
# agreements = "/etc/aquifer/groups"

{peers}"#
    )
}

/// Returns the section that names a peer to a host.
pub(super) fn peer(host: &HostName, address: &str) -> String {
    format!("[[peer]]\nname = \"{host}\"\naddress = \"{address}\"\n")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use aquifer_agent::config::Config;

    use super::*;

    fn load(text: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        std::fs::write(&path, text).unwrap();
        Config::load(&path).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn commented() -> String {
        let member = Member::new(&"a".parse().unwrap(), "192.0.2.1").unwrap();
        config(&member, &peer(&"b".parse().unwrap(), "192.0.2.2:7070"))
    }

    /// Returns the text with every commented key in force, except for keys without a default.
    fn uncommented() -> String {
        let in_force = |line: &str| match line.strip_prefix("# ") {
            Some(rest)
                if rest.split_once(" = ").is_some_and(|(key, _)| {
                    key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
                }) =>
            {
                rest.to_owned()
            }
            _ => line.to_owned(),
        };
        let without_default = |line: &String| {
            let limits = ["host_bytes", "host_requests", "lease_bytes", "lease_requests"];
            ["cgroup", "reserved", "nvme", "zone"]
                .iter()
                .chain(&limits)
                .any(|key| line.starts_with(&format!("{key} = ")))
        };
        commented()
            .lines()
            .map(in_force)
            .filter(|line| !without_default(line))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn an_agent_understands_the_configuration_of_a_new_host() {
        let config = load(&commented());
        assert_eq!((config.host.as_str(), config.peers.len()), ("a", 1));
        assert_eq!(config.listen.to_string(), "192.0.2.1:7070");
    }

    #[test]
    fn an_agent_understands_the_configuration_of_a_joined_host() {
        let ip = IpAddr::from([192, 0, 2, 1]);
        let keys = [("tls", "/x \"y\"/tls".into()), ("accept", true.into())];
        let config = load(&of_cluster(&"a".parse().unwrap(), ip, &keys));
        assert!(config.vms.accept && !config.groups.balance);
        assert_eq!((config.host.as_str(), config.peers.len()), ("a", 0));
        assert_eq!(config.tls, Path::new("/x \"y\"/tls"));
        assert_eq!(config.cluster, Path::new("/var/lib/aquifer/cluster"));
    }

    #[test]
    fn commented_settings_are_the_defaults() {
        assert!(
            uncommented().lines().filter(|line| line.contains(" = ")).count() > 20,
            "{}",
            uncommented()
        );
        let as_is = format!("{:?}", load(&commented()));
        // Only a configuration that names the store has the host's name in it.
        let spelled = format!("{:?}", load(&uncommented()))
            .replace("store: Some(\"/dev/shm/aquifer/a\")", "store: None");
        assert_eq!(spelled, as_is);
    }
}
