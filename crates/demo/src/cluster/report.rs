//! The figures of the demo.

use std::fmt;

use serde::Serialize;

use super::guest::Tally;
use super::sharing::Shared;
use super::watch::Seen;

/// The output of `aquifer demo cluster --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The hosts that made the cluster.
    pub hosts: u64,
    /// Configuration files of members that changed when others joined or left.
    pub files_edited: u64,
    /// Milliseconds from each `cluster join` until the first host saw the new one up.
    pub join_ms: Vec<u64>,
    /// Hosts that have the agreement and key of the group, which was created on one of them.
    pub group_hosts: u64,
    /// What two VMs of the group shared.
    #[serde(flatten)]
    pub shared: Shared,
    /// The pages of both guests.
    #[serde(flatten)]
    pub tally: Tally,
    /// Leases that their lenders recalled.
    pub recalls: u64,
    /// Moves of the VM to another host.
    pub moves: u64,
    /// Milliseconds from `host drain` until the host had left the cluster, for the slower of two.
    pub drained_ms: u64,
    /// Readings of hosts' ledgers, four a second of each host.
    pub ledger_readings: u64,
    /// Readings in which the classes of a host's memory did not add up.
    pub ledger_violations: u64,
    /// The decisions of all agents, in order of time.
    pub decisions: Vec<Decided>,
}

/// A decision of an agent.
#[derive(Clone, Debug, Serialize)]
pub struct Decided {
    /// Seconds since all hosts had joined; decisions before that have negative times.
    pub at_s: f64,
    /// The host.
    pub host: &'static str,
    /// One sentence, with the numbers that led to the decision.
    pub what: String,
}

/// The figures of the play that the observer does not see.
#[derive(Clone, Debug)]
pub(super) struct Played {
    pub(super) files_edited: u64,
    pub(super) join_ms: Vec<u64>,
    /// The pages of both guests.
    pub(super) tally: Tally,
    pub(super) group_hosts: u64,
    pub(super) shared: Shared,
    pub(super) drained_ms: u64,
}

impl Summary {
    pub(super) fn new(played: Played, seen: &Seen) -> Self {
        Self {
            hosts: seen.hosts.len() as u64,
            files_edited: played.files_edited,
            join_ms: played.join_ms,
            group_hosts: played.group_hosts,
            shared: played.shared,
            tally: played.tally,
            recalls: seen.recalled.len() as u64,
            moves: moves(seen),
            drained_ms: played.drained_ms,
            ledger_readings: seen.readings(),
            ledger_violations: seen.violations(),
            decisions: decisions(seen),
        }
    }
}

/// Counts the moves of VMs that agents decided on and completed.
fn moves(seen: &Seen) -> u64 {
    let decisions = seen.hosts.iter().flat_map(|host| &host.decisions);
    decisions.filter(|decision| decision.what.starts_with("moved VM ")).count() as u64
}

fn decisions(seen: &Seen) -> Vec<Decided> {
    let of_host = |host: &super::watch::Watched| {
        let name = host.name;
        let decided = host.decisions.iter().map(move |decision| Decided {
            at_s: ((decision.at - seen.began) * 1000.0).round() / 1000.0,
            host: name,
            what: decision.what.clone(),
        });
        decided.collect::<Vec<_>>()
    };
    let mut decisions: Vec<_> = seen.hosts.iter().flat_map(of_host).collect();
    decisions.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    decisions
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joins: Vec<_> = self.join_ms.iter().map(ToString::to_string).collect();
        writeln!(
            f,
            "{} hosts, joined in {} ms, {} files edited",
            self.hosts,
            joins.join(", "),
            self.files_edited
        )?;
        let Tally { written, verified, wrong } = self.tally;
        writeln!(f, "{verified} pages verified of {written} written, {wrong} wrong")?;
        writeln!(
            f,
            "{} leases recalled, {} moves of the VM, at most {} ms to drain a host and leave",
            self.recalls, self.moves, self.drained_ms
        )?;
        let Shared { shared, saved, unshared } = self.shared;
        let kept = shared.saturating_sub(saved);
        writeln!(
            f,
            "two VMs of a group shared {shared} in {kept} until they wrote to {unshared} pages; {} \
             hosts know it",
            self.group_hosts
        )?;
        let (violations, readings) = (self.ledger_violations, self.ledger_readings);
        writeln!(f, "{violations} of {readings} readings of ledgers did not add up")?;
        writeln!(f, "Decisions:")?;
        for Decided { at_s, host, what } in &self.decisions {
            writeln!(f, "  {at_s:7.2} s  host {}  {what}", host.to_uppercase())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use aquifer_api::status::Decision;
    use aquifer_page::Bytes;

    use super::super::watch::Watched;
    use super::*;

    #[test]
    fn decisions_of_all_hosts_are_in_order_of_time() {
        let decided = |at, what: &str| Decision { at, what: what.to_owned(), about: Vec::new() };
        let host =
            |name, decisions| Watched { name, samples: Vec::new(), decisions, events: Vec::new() };
        let a = host("a", vec![decided(101.0, "asks"), decided(103.25, "moved VM web to b")]);
        let b = host("b", vec![decided(99.5, "joins"), decided(102.0, "grants")]);
        let seen = Seen { began: 100.0, hosts: vec![a, b], ..Seen::default() };
        let tally = Tally { written: 13, verified: 12, wrong: 1 };
        let shared = Shared { shared: Bytes::mib(5), saved: Bytes::mib(3), unshared: 7 };
        let played = Played {
            files_edited: 0,
            join_ms: vec![7, 8],
            tally,
            group_hosts: 4,
            shared,
            drained_ms: 5,
        };
        let summary = Summary::new(played, &seen);
        let order: Vec<_> = summary.decisions.iter().map(|it| (it.at_s, it.host)).collect();
        assert_eq!(order, [(-0.5, "b"), (1.0, "a"), (2.0, "b"), (3.25, "a")]);
        assert_eq!((summary.hosts, summary.moves, summary.ledger_violations), (2, 1, 0));
        let text = summary.to_string();
        assert!(
            text.starts_with("2 hosts, joined in 7, 8 ms, 0 files edited\n12 pages verified of 13")
        );
        let shared = "two VMs of a group shared 5MiB in 2MiB until they wrote to 7 pages; 4 hosts \
                      know it\n";
        assert!(text.contains(shared), "{text}");
        assert!(text.ends_with("    3.25 s  host A  moved VM web to b\n"), "{text}");
    }
}
