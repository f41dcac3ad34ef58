//! The commented configuration of a new host.

use std::net::SocketAddr;

use aquifer_page::HostName;

use super::{Member, PAGES_PORT};

/// The port registered for NVMe over Fabrics.
const NVME_PORT: u16 = 4420;

/// Returns the text of `agent.toml` for a host, with its peers' sections at the end.
pub(super) fn config(member: &Member, peers: &str) -> String {
    let host = &member.name;
    let listen = SocketAddr::from((member.ip, super::AGENT_PORT));
    let pages = SocketAddr::from((member.ip, PAGES_PORT));
    let nvme = SocketAddr::from((member.ip, NVME_PORT));
    format!(
        r#"# The agent of host {host}. What is commented out shows its default.
# Sizes: 4096, "512MiB", "2G". Times: "500ms", "8s", "10m".

# This host's name, as its certificate has it.
host = "{host}"
# Where the other hosts' agents call this one (HTTP over mutual TLS).
listen = "{listen}"
# Where borrowers reach the pages they have lent out of this host (NBD over mutual TLS).
pages = "{pages}"
# The certificate, the key and the authority's certificate.
# tls = "/etc/aquifer/tls"
# The socket for 'aquifer status', 'borrow' and 'return'.
# socket = "/run/aquifer/agent.sock"
# Control sockets and logs of volumes.
# state = "/run/aquifer"
# The tmpfs directory that holds lent pages. They outlive the agent.
# store = "/dev/shm/aquifer/{host}"

[memory]
# Manage one memory cgroup, a path under /sys/fs/cgroup, instead of the whole host.
# cgroup = "/sys/fs/cgroup/…"
# Keep that cgroup from swapping except while this agent has a borrowed device on.
# gate_swap = false
# How often memory is looked at.
# period = "1s"
# Borrow when more than this share of memory is used ...
# upper = 0.8
# ... and return when use and borrowed swap together are below this share.
# lower = 0.6
# Tasks that wait for memory for more than this share of time count as short of memory too (PSI); 0 turns it off.
# pressure = 0.1

[lend]
# enabled = true
# Memory kept for this host's own programs. Without it, whatever is not used can be lent.
# reserved = "4G"
# How long the lease of a borrower that is gone is kept.
# grace = "10m"
# What holds lent pages: "store", served by the agent, or "kernel", zram devices served by the kernel's own NVMe target.
# backend = "store"
# Where borrowers reach their leases over NVMe/TCP too (always with backend = "kernel"), and whether over RDMA as well, by
# the kernel only. Of what travels only pages are encrypted, and not those of hosts that attach "direct": for networks that you trust.
# nvme = "{nvme}"
# rdma = false
# Borrowers prove by a secret that is made for each lease who they are (DH-HMAC-CHAP); some kernels cannot.
# secrets = true

[borrow]
# Borrow by itself; 'aquifer borrow' works in any case.
# enabled = true
# How much is asked for at a time ...
# request = "1G"
# ... and the most that is borrowed in all.
# max = "16G"
# The tenant to whom lenders account the leases.
# group = "default"
# Where pages go that a lender wants back when nobody else has room: a local file.
# spill = "/var/lib/aquifer/spill"
# How long I/O waits for a lender that does not answer.
# io_timeout = "8s"
# By what this host swaps: "pool", a volume over any number of leases, or "direct", the kernel's own NVMe initiator, straight
# to one lender.
# attach = "pool"
# How pages travel: "nbd" (over mutual TLS), or, with nothing but the pages encrypted, "nvme-tcp", or "nvme-rdma" (direct only, not encrypted).
# protocol = "nbd"
# How volumes become block devices: auto, ublk, nbd or fuse-loop.
# backend = "auto"
# Swap priority of borrowed devices; -1 leaves it to the kernel.
# priority = 100

[vms]
# Take VMs that other hosts move here ('aquifer vm migrate'). Who may do that may have QEMU do here what it likes.
# accept = false
# QEMU itself.
# qemu = "qemu-system-x86_64"

[groups]
# Hand out what groups save by sharing pages on this host, to their VMs ('aquifer group balance').
# balance = false
# Where their agreements are.
# agreements = "/etc/aquifer/groups"

# The other hosts.
{peers}"#
    )
}

/// Returns the section that names a peer to a host.
pub(super) fn peer(host: &HostName, address: &str) -> String {
    format!("[[peer]]\nname = \"{host}\"\naddress = \"{address}\"\n")
}

#[cfg(test)]
mod tests {
    use aquifer_agent::config::Config;

    use super::*;

    fn load(text: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        std::fs::write(&path, text).unwrap();
        Config::load(&path).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn text() -> String {
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
            ["cgroup", "reserved", "nvme"].iter().any(|key| line.starts_with(&format!("{key} = ")))
        };
        text()
            .lines()
            .map(in_force)
            .filter(|line| !without_default(line))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn an_agent_understands_what_a_new_host_gets() {
        let config = load(&text());
        assert_eq!((config.host.as_str(), config.peers.len()), ("a", 1));
        assert_eq!(config.listen.to_string(), "192.0.2.1:7070");
    }

    #[test]
    fn what_is_commented_out_is_the_default() {
        assert!(
            uncommented().lines().filter(|line| line.contains(" = ")).count() > 20,
            "{}",
            uncommented()
        );
        let as_is = format!("{:?}", load(&text()));
        // Only a configuration that names the store has the host's name in it.
        let spelled = format!("{:?}", load(&uncommented()))
            .replace("store: Some(\"/dev/shm/aquifer/a\")", "store: None");
        assert_eq!(spelled, as_is);
    }
}
