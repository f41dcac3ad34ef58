//! The commented configuration that a new host gets.

use std::net::SocketAddr;

use aquifer_page::HostName;

use super::{Member, PAGES_PORT};

/// The text of `agent.toml` for a host, with its peers' sections at the end.
pub(super) fn config(member: &Member, peers: &str) -> String {
    let host = &member.name;
    let listen = SocketAddr::from((member.ip, super::AGENT_PORT));
    let pages = SocketAddr::from((member.ip, PAGES_PORT));
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
# patience = "8s"
# How volumes become block devices: auto, ublk, nbd or fuse-loop.
# backend = "auto"
# Swap priority of borrowed devices; -1 leaves it to the kernel.
# priority = 100

# The other hosts.
{peers}"#
    )
}

/// The section that tells a host of another.
pub(super) fn peer(host: &HostName, address: &str) -> String {
    format!("[[peer]]\nname = \"{host}\"\naddress = \"{address}\"\n")
}
