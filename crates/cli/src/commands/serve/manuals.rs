//! The manuals of `aquifer serve` and of its services.

use super::{agent, export};
use crate::manual::Manual;

/// One manual for each service, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] = &[
    ("agent", &agent::MANUAL),
    ("export", &export::MANUAL),
    ("dedup", &DEDUP),
    ("reprovision", &REPROVISION),
    ("disk-cache", &DISK_CACHE),
    ("vm-balancer", &VM_BALANCER),
];

pub(in crate::commands) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer serve agent", "Run this host's agent"),
        ("aquifer serve export --size 4G", "Offer 4 GiB of this host's RAM"),
        ("aquifer serve dedup blue --report 10s", "Share equal pages of the VMs of group 'blue'"),
    ],
    notes: &[(
        "As a service",
        "Run each under systemd with KillMode=process and Restart=always; for the agent, use \
         Restart=on-failure. Each continues where a killed one stopped; an export does so only \
         with --dir.",
    )],
    ..Manual::NONE
};

const DEDUP: Manual = Manual {
    examples: &[
        (
            "aquifer serve dedup blue --report 10s",
            "Share equal pages and report savings every 10 s",
        ),
        ("aquifer serve dedup blue --undo", "Stop sharing pages"),
    ],
    notes: &[(
        "Equal pages on one host",
        "While it runs, it looks for equal pages in the group's regions, including those of \
         VMs. It runs at the lowest priority, or in the group's cgroup. You may kill \
         and restart it: pages stay shared until a write or --undo. It never reads pages of \
         another group.",
    )],
    see_also: &["aquifer-group(1)"],
    ..Manual::NONE
};

const REPROVISION: Manual = Manual {
    examples: &[
        ("aquifer serve reprovision", "Hand out the memory that sharing saves to the groups' VMs"),
        ("aquifer serve reprovision --dry-run --periods 1", "Print one period's decisions"),
        ("aquifer serve reprovision --undo", "Give every VM its own memory again"),
    ],
    see_also: &["aquifer-group(1)", "aquifer-serve-dedup(1)"],
    ..Manual::NONE
};

const DISK_CACHE: Manual = Manual {
    examples: &[
        ("aquifer serve disk-cache blue --size 2G", "Cache the group's disks in at most 2 GiB"),
        (
            "aquifer serve disk-cache blue --lender nbds://b:10811/ --tls /etc/aquifer/tls",
            "Evict cached disk pages to the group's cache on host b, which runs with --lend",
        ),
    ],
    notes: &[(
        "Limits",
        "It serves the disks of VMs that start with 'vm start --group NAME --cached-disk FILE', \
         for as long as it runs. An agent starts one for a VM that finds none, with the defaults; \
         run it yourself for other options. With a size of 0 it caches nothing. The cache holds \
         only clean pages and can shrink at once: a guest's write reaches the disk before the \
         guest is told that it is done. You may kill and restart it; guests wait meanwhile, \
         indefinitely. One VM may write a disk, or any number may read it. Its index costs 1/50 of \
         the cached memory, and each connection up to 33 MiB. If the OOM killer ends it, guests \
         wait until the agent starts another one. Without an agent, run it under systemd with \
         Restart=always and an OOMScoreAdjust.",
    )],
    files: &[
        (
            "/run/aquifer/regions/@NAME/cache.nbd",
            "disks over NBD by path (ro:PATH for reading, arriving:PATH for a VM that moves here)",
        ),
        ("/run/aquifer/regions/@NAME/cache.control", "control socket, for 'serve reprovision'"),
    ],
    see_also: &["aquifer-group(1)", "aquifer-serve-reprovision(1)"],
    ..Manual::NONE
};

const VM_BALANCER: Manual = Manual {
    examples: &[
        ("aquifer serve vm-balancer", "Move memory to the VMs that need it"),
        ("aquifer serve vm-balancer --dry-run --periods 1", "Print one period's decisions"),
    ],
    see_also: &["aquifer-vm(1)"],
    ..Manual::NONE
};
