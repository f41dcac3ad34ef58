//! The reference of the configuration: each key's type, default and meaning, for docs and man page.
//!
//! Tests compare it with the parser: a key that only one of them knows is an error.

/// A table of the file, with its keys.
#[derive(Debug)]
pub struct Section {
    /// The table's path in the file; empty for keys at the top, in brackets for repeated tables.
    pub name: &'static str,
    /// All keys that the parser knows there.
    pub keys: &'static [Key],
    /// Paragraphs after the keys, in Markdown.
    pub notes: &'static [&'static str],
}

/// A key of the file.
#[derive(Debug)]
pub struct Key {
    /// The key.
    pub name: &'static str,
    /// The type of its value, or the words that it can be.
    pub kind: &'static str,
    /// The default, as the file would have it; `None` if the meaning tells what no value means.
    pub default: Option<&'static str>,
    /// What it sets, in Markdown.
    pub meaning: &'static str,
}

const fn key(
    name: &'static str,
    kind: &'static str,
    default: &'static str,
    meaning: &'static str,
) -> Key {
    let default = if default.is_empty() { None } else { Some(default) };
    Key { name, kind, default, meaning }
}

/// All tables of the file, in order.
pub const SECTIONS: &[Section] = &[
    Section { name: "", keys: TOP, notes: TOP_NOTES },
    Section { name: "access", keys: ACCESS, notes: ACCESS_NOTES },
    Section { name: "certificates", keys: CERTIFICATES, notes: CERTIFICATES_NOTES },
    Section { name: "memory", keys: MEMORY, notes: MEMORY_NOTES },
    Section { name: "lend", keys: LEND, notes: &[] },
    Section { name: "lend.limits", keys: LEND_LIMITS, notes: LEND_LIMITS_NOTES },
    Section { name: "borrow", keys: BORROW, notes: BORROW_NOTES },
    Section { name: "vms", keys: VMS, notes: VMS_NOTES },
    Section { name: "vms.balancer", keys: VMS_BALANCER, notes: &[] },
    Section { name: "groups", keys: GROUPS, notes: &[] },
    Section { name: "[peer]", keys: PEER, notes: PEER_NOTES },
];

const TOP: &[Key] = &[
    key("host", "name", "", "this host's name, as in its certificate; required"),
    key("listen", "IP:PORT", "\"127.0.0.1:7070\"", "where peers reach the agent (mutual TLS)"),
    key(
        "pages",
        "IP:PORT",
        "\"127.0.0.1:7071\"",
        "where borrowers reach the pages of their leases (NBD, mutual TLS)",
    ),
    key("socket", "path", "\"/run/aquifer/agent.sock\"", "unix socket for the command line"),
    key(
        "state",
        "path",
        "\"/run/aquifer\"",
        "directory of control sockets, records and logs of volumes",
    ),
    key(
        "store",
        "path",
        "",
        "the tmpfs directory of lent pages; by default `/dev/shm/aquifer/HOST`",
    ),
    key("tls", "path", "\"/etc/aquifer/tls\"", "directory of `ca.pem`, `host.pem` and `host.key`"),
    key(
        "cluster",
        "path",
        "\"/var/lib/aquifer/cluster\"",
        "directory of the cluster's key and hosts, which `aquifer cluster join` writes; without \
         it, the only peers are those of this file",
    ),
    key(
        "zone",
        "name",
        "",
        "the zone that this host is in, such as its rack: hosts of one zone may fail together",
    ),
];

const TOP_NOTES: &[&str] = &[
    "The agent sends `pages` to borrowers unchanged, so it must name one address of this host, not \
     0.0.0.0.",
    "The agent refuses a `store` that another user made or may write to. At `/dev/shm/aquifer` the \
     first root process mounts a tmpfs of 80 % of RAM. That tmpfs stays, and the kernel swaps none \
     of it out (Linux 6.4). Anywhere else, the size of the tmpfs, often half of RAM, limits what \
     the host can lend.",
];

const ACCESS: &[Key] = &[
    key("read", "groups", "[]", "the unix groups whose members may look: `status`, `why`, hosts"),
    key("operate", "groups", "[]", "those whose members may also borrow, return, drain, migrate"),
    key("admin", "groups", "[]", "those whose members may also change who is in the cluster"),
];

const ACCESS_NOTES: &[&str] = &[
    "They concern the agent's unix socket, which only root may use while all three are empty. Root \
     may do all, as may the user that the agent runs as. Commands that read files of root, such as \
     those about VMs, still need root.",
    "If a group is named, the agent lets all users pass through the socket's directory (`o+x`). A \
     member of a group can have 32 connections, and all members together 256.",
];

const CERTIFICATES: &[Key] = &[
    key(
        "lifetime",
        "time",
        "\"7d\"",
        "time from a certificate's issue to its end, 1h to 30d; hosts renew theirs after a third",
    ),
    key(
        "for_drills",
        "boolean",
        "false",
        "allow lifetimes from 5s on: hosts then lose contact once the signer is away for that long",
    ),
];

const CERTIFICATES_NOTES: &[&str] = &[
    "They hold on a signer, that is, on a host that can admit others: it signs the certificates of \
     all hosts. Other hosts take them at their next renewal.",
];

const MEMORY: &[Key] = &[
    key("cgroup", "path", "", "manage this memory cgroup instead of the host"),
    key(
        "gate_swap",
        "boolean",
        "false",
        "let that cgroup swap only while a borrowed device of this agent is on",
    ),
    key("period", "time", "\"1s\"", "time between two readings, 50ms to 1m"),
    key("upper", "share", "0.8", "`T_upper` of [Ge23]: borrow above this share of memory"),
    key(
        "lower",
        "share",
        "0.6",
        "`T_lower`: return when use and borrowed swap together are below this share",
    ),
    key(
        "pressure",
        "share",
        "0.1",
        "also borrow when tasks wait for memory for this share of time, from 0 (off) to below 1",
    ),
];

const MEMORY_NOTES: &[&str] = &[
    "`pressure` is PSI's \"some\". It counts only while the kernel reclaims for the host or the \
     managed cgroup itself. Reclaim at the limits of cgroups within does not count. A v1 cgroup \
     has no PSI of its own.",
    "**Managing one cgroup.** `M_t` is then the cgroup's limit and `M_u` its usage (v1 and v2). \
     Pages stored for borrowers count as used, wherever the agent runs. Run the agent outside the \
     cgroup. Volume processes leave the cgroup themselves: a process that serves swap must never \
     wait for memory of the programs that swap to it.",
    "Swap devices belong to the whole kernel. Set `gate_swap = true` to keep the cgroup from using \
     devices that other agents borrowed. The agent then sets `memory.memsw.limit_in_bytes` (v1, \
     needs swap accounting) or `memory.swap.max` (v2).",
];

const LEND: &[Key] = &[
    key("enabled", "boolean", "true", "whether the agent lends"),
    key(
        "reserved",
        "size",
        "",
        "`M_r`, memory for this host's own programs, VMs and caches, which is never lent: `M_s = \
         M_t - M_r` (eq. 1); without it `M_s = M_t - M_u` (eq. 2)",
    ),
    key("grace", "time", "\"10m\"", "how long the agent keeps the lease of a silent borrower"),
    key(
        "backend",
        "`store`, `kernel`",
        "\"store\"",
        "`store`: served by the agent; `kernel`: zram, served by the kernel's NVMe target",
    ),
    key(
        "nvme",
        "IP:PORT",
        "",
        "address at which borrowers also reach leases over NVMe/TCP; by default none",
    ),
    key(
        "rdma",
        "boolean",
        "false",
        "the same over RDMA, at that address; needs `backend = \"kernel\"`",
    ),
    key(
        "secrets",
        "boolean",
        "true",
        "borrowers over NVMe must prove their identity (DH-HMAC-CHAP)",
    ),
    key(
        "network_share",
        "share",
        "0.8",
        "the part of the link's speed that lending may use while this host's own programs use the \
         link; 1.0 sets no limit, and without a known speed there is none",
    ),
];

const LEND_LIMITS: &[Key] = &[
    key(
        "host_bytes",
        "size",
        "",
        "bytes a second that a host may read and write; by default no limit",
    ),
    key("host_requests", "number", "", "requests a second of a host; by default no limit"),
    key("host_connections", "number", "512", "connections of a host to all its leases"),
    key("lease_bytes", "size", "", "the same for one lease"),
    key("lease_requests", "number", "", "the same for one lease"),
    key("lease_connections", "number", "256", "connections to one lease"),
];

const LEND_LIMITS_NOTES: &[&str] = &[
    "A request over a rate waits and gets no error, while other borrowers go on. A connection too \
     many is refused. A limit must be at least 1 MiB or 256 requests a second, or 8 connections. \
     [Limit borrowers](../howto/limits.md) tells what a low limit does to a borrower.",
    "Without limits, hosts still take turns when this host is saturated. The kernel's target \
     (`backend = \"kernel\"`) has no limits.",
];

const BORROW: &[Key] = &[
    key(
        "enabled",
        "boolean",
        "true",
        "whether the agent borrows automatically; `aquifer host borrow` works in any case",
    ),
    key("request", "size", "\"1G\"", "`M_req`: what one request asks for, at least 64MiB"),
    key(
        "max",
        "size",
        "\"16G\"",
        "the most that the agent borrows; it makes `opportunistic` copies within this, but later \
         loans do not count them, so it may hold up to twice as much",
    ),
    key(
        "protection",
        "`none`, `mirror`, `opportunistic` or `disk`",
        "\"opportunistic\"",
        "with `mirror`, a second lender keeps a copy of each page that a region has at lenders; \
         with `opportunistic`, only while it has memory that nobody else needs, and a moment \
         behind; with `disk`, this host's disk keeps it, in the directory `spill`",
    ),
    key("protection_by_group", "table", "{}", "the same for the regions of a group: `NAME = KIND`"),
    key("protection_by_region", "table", "{}", "the same for a region or VM, before its group"),
    key(
        "protection_of_swap",
        "`none`, `mirror` or `opportunistic`",
        "\"none\"",
        "the same for the pages that this host swaps out, but each write waits for both lenders; \
         not with `attach = \"direct\"`",
    ),
    key("group", "name", "\"default\"", "the tenant to which lenders account the leases"),
    key(
        "spill",
        "path",
        "\"/var/lib/aquifer/spill\"",
        "directory of files for pages that no lender has room for, and for copies of pages",
    ),
    key(
        "key_lifetime",
        "time, `never`",
        "\"30d\"",
        "how old the key of a lease gets: then another lease with a new key replaces it, while \
         programs run; at least 1s",
    ),
    key("io_timeout", "time", "\"8s\"", "how long I/O waits for a silent lender, at least 100ms"),
    key(
        "attach",
        "`pool`, `direct`",
        "\"pool\"",
        "`pool`: volumes over any number of leases; `direct`: the kernel attaches one lease",
    ),
    key(
        "protocol",
        "`nbd`, `nvme-tcp`, `nvme-rdma`",
        "\"nbd\"",
        "how pages travel; `nvme-rdma` with `direct` only",
    ),
    key(
        "backend",
        "`auto`, `ublk`, `nbd`, `fuse-loop`",
        "\"auto\"",
        "the block device driver; `auto` takes the first that works",
    ),
    key("priority", "number", "100", "swap priority; -1 leaves it to the kernel"),
];

const BORROW_NOTES: &[&str] = &[
    "To replace a key, the agent borrows for the pages of its lease, moves them there, and gives \
     the lease back: one lease at a time, and only while a lender has room. \
     [Security](../explain/security.md#keys-that-are-replaced) tells which keys that concerns. \
     `aquifer host rotate-keys` does it at once.",
    "Spilled pages are encrypted. The key of a volume for swap is only in its process, and that of \
     a region only in its record. No other host may use the directory. `attach = \
     \"direct\"` needs `protocol = \"nvme-tcp\"` or `\"nvme-rdma\"`. \
     [Concepts](../explain/concepts.md#ways-between-hosts) lists the combinations, and what \
     carries the pages in each.",
];

const VMS: &[Key] = &[
    key(
        "dir",
        "path",
        "\"/var/lib/aquifer/vms\"",
        "directory of the definitions of VMs (`aquifer vm create`), which the agent starts",
    ),
    key("accept", "boolean", "false", "whether peers may migrate VMs here"),
    key(
        "qemu",
        "program",
        "\"qemu-system-x86_64\"",
        "the QEMU program for VMs that peers migrate here",
    ),
    key(
        "balance",
        "boolean",
        "false",
        "whether the agent moves memory between VMs, as `aquifer serve vm-balancer` does",
    ),
    key(
        "move_after",
        "time, `never`",
        "\"5m\"",
        "how long this host is overloaded until a VM moves to another host that accepts it",
    ),
];

const VMS_NOTES: &[&str] = &[
    "A peer that may migrate a VM here controls a QEMU process on this host, which runs as root.",
    "Overload is use above `upper`, or tasks that wait for memory (`pressure`). It must last \
     although the host balances its VMs, takes its leases back and borrows, if it may. \
     [Migrate a VM](../howto/migrate.md#moves-by-overload) has the rule for which VM moves.",
];

const VMS_BALANCER: &[Key] = &[
    key("slack", "share", "0.25", "free memory that a guest gets, as a share of its use"),
    key("least_slack", "size", "\"128MiB\"", "the least free memory that a guest gets"),
    key(
        "ahead_periods",
        "number",
        "4",
        "periods to look ahead when a guest's use has risen for three",
    ),
    key(
        "surplus_periods",
        "number",
        "5",
        "periods that a surplus must last before the balancer takes it",
    ),
    key("hold_after_grow", "number", "10", "periods for which a VM that grew gives nothing"),
    key(
        "pressure_percent",
        "number",
        "5.0",
        "a guest that stalls on memory longer (PSI \"some\", in %) needs memory",
    ),
    key("swap_is_need", "boolean", "true", "whether a guest that swaps needs memory"),
    key(
        "keep_surplus",
        "boolean",
        "true",
        "whether a VM keeps its surplus until another VM needs it",
    ),
];

const GROUPS: &[Key] = &[
    key("agreements", "path", "\"/etc/aquifer/groups\"", "directory of the groups' agreements"),
    key(
        "balance",
        "boolean",
        "false",
        "whether the agent gives savings to VMs, as `aquifer serve reprovision` does",
    ),
    key(
        "scan",
        "boolean",
        "true",
        "whether the agent runs `aquifer serve dedup` for each group with two regions here",
    ),
];

const PEER: &[Key] = &[
    key("name", "name", "", "the peer, as in its certificate; required"),
    key("address", "HOST:PORT", "", "where its agent listens; required"),
];

const PEER_NOTES: &[&str] =
    &["There is one such table for each other host. If two hosts no longer list each other, they \
     give back what they lent each other. At its start each agent logs those leases."];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write as _;

    use super::*;
    use crate::config::Config;

    /// Returns the names that the parser knows in a section, as its error for another one says.
    fn known(section: &str) -> BTreeSet<String> {
        let table = if section.is_empty() { String::new() } else { format!("[{section}]\n") };
        let text = format!("{table}unknown_key = 1\n");
        let error = toml::from_str::<Config>(&text).expect_err("the key is unknown").to_string();
        let (_, names) = error.split_once("expected ").expect("the error lists the known keys");
        names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn the_reference_has_every_key_that_the_parser_knows() {
        for section in SECTIONS {
            let inside = |name: &str| match name.trim_matches(['[', ']']).rsplit_once('.') {
                Some((outer, inner)) if outer == section.name => Some(inner.to_owned()),
                None if section.name.is_empty() && !name.is_empty() => {
                    Some(name.trim_matches(['[', ']']).to_owned())
                }
                _ => None,
            };
            let tables = SECTIONS.iter().filter_map(|section| inside(section.name));
            let named = section.keys.iter().map(|key| key.name.to_owned());
            assert_eq!(named.chain(tables).collect::<BTreeSet<_>>(), known(section.name));
        }
    }

    #[test]
    fn the_reference_has_the_defaults_of_the_parser() {
        let mut text = "host = 'a'\n".to_owned();
        for Section { name, keys, .. } in SECTIONS {
            if !name.is_empty() && !name.starts_with('[') {
                writeln!(text, "[{name}]").unwrap();
            }
            for Key { name, default, .. } in *keys {
                if let Some(default) = default {
                    writeln!(text, "{name} = {default}").unwrap();
                }
            }
        }
        let [given, default] =
            [&*text, "host = 'a'"].map(|text| toml::from_str::<Config>(text).unwrap());
        assert_eq!(format!("{given:?}"), format!("{default:?}"));
    }
}
