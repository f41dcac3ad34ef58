//! The headings of options in `--help`, one table so that an option has the same one everywhere.

use clap::Arg;

/// A heading, the commands where it applies by the words that they begin with, and their options.
/// The first line that names an option counts. All others are under "Options".
const HEADINGS: &[(&str, &[&str], &[&str])] = &[
    ("Guest", &["vm"], &["kernel", "initrd", "append", "disk", "cached-disk", "cpus"]),
    ("Guest", &["vm"], &["accel", "cpu", "machine", "qemu"]),
    ("Savings", &["group"], &["scan", "policy", "step", "cache-reserve", "allow-lending"]),
    ("Limits", &["group"], &["member", "max-members", "max-memory", "max-cache", "cgroup", "host"]),
    ("Limits", &["serve", "export"], &["host-bytes", "host-requests", "host-connections"]),
    ("Limits", &["serve", "export"], &["lease-bytes", "lease-requests", "lease-connections"]),
    ("Addresses", &["serve", "export"], &["nbd", "nvme", "kernel", "rdma", "name"]),
    ("Cluster", &["simulate"], &["hosts", "for", "seed", "trace", "memory"]),
    ("VMs", &["simulate"], &["vms", "vm-size", "move-after"]),
    ("Network", &["simulate"], &["loss", "duplication", "delay", "bandwidth"]),
    ("Faults", &["simulate"], &["crashes", "cuts", "outage", "drains"]),
    ("Memory", &[], &["size", "memory", "max-memory", "min", "max", "weight", "reserve", "cache"]),
    ("Memory", &[], &["huge-pages", "quota", "local", "remote", "share", "section", "group"]),
    ("Memory", &[], &["slack", "least-slack", "surplus-periods", "reclaim", "overcommit"]),
    ("Paging", &[], &["policy", "scheme", "prefetch", "workers", "emulate-link", "one-at-a-time"]),
    ("Device", &[], &["swap", "priority", "backend", "direct", "queues"]),
    ("Lenders", &[], &["lender", "protection", "copy-dir", "borrow", "lend", "take-over"]),
    ("Security", &[], &["tls", "lender-host", "dhchap-secret", "host-nqn", "allow-host", "token"]),
    ("Security", &[], &["unencrypted", "encryption"]),
    ("Timeouts", &[], &["io-timeout", "fault-timeout", "timeout", "retry", "max-downtime"]),
    ("Output", &[], &["json", "report", "watch", "stages"]),
    ("Output", &["status"], &["cluster"]),
    ("Paths", &[], &["run-dir", "socket", "groups", "config", "dir", "cluster-dir", "vm-dir"]),
];

/// Puts an option of the command that `words` name under its heading.
pub(super) fn headed(option: Arg, words: &[&str]) -> Arg {
    let long = option.get_long();
    let line = HEADINGS.iter().find(|(_, command, options)| {
        words.starts_with(command) && long.is_some_and(|long| options.contains(&long))
    });
    match line {
        Some((heading, ..)) => option.help_heading(*heading),
        None => option,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::commands::command;
    use crate::commands::tests::each;

    #[test]
    fn every_option_with_a_heading_exists() {
        let mut headed = BTreeSet::new();
        let mut note = |words: &[&str], command: &clap::Command| {
            for long in command.get_arguments().filter_map(Arg::get_long) {
                let is_it = |line: &&(&str, &[&str], &[&str])| {
                    words.starts_with(line.1) && line.2.contains(&long)
                };
                headed.extend(HEADINGS.iter().find(is_it).map(|line| (line.0, long.to_owned())));
            }
        };
        note(&[], &command());
        each(&command(), &[], &mut note);
        for (heading, _, options) in HEADINGS {
            for option in *options {
                assert!(headed.contains(&(*heading, (*option).to_owned())), "{heading}: {option}");
            }
        }
    }

    #[test]
    fn no_command_has_a_long_list_without_headings() {
        each(&command(), &[], &mut |words, command| {
            let plain = command.get_opts().filter(|option| option.get_help_heading().is_none());
            assert!(plain.count() <= 6, "{words:?} needs headings");
        });
    }
}
