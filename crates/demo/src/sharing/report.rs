//! The figures of the demo.

use std::fmt;
use std::time::Duration;

use aquifer_api::status::Role;
use aquifer_cli::load::Verdict;
use aquifer_page::Bytes;
use serde::Serialize;

use super::watch::{Overload, Seen};

/// The output of `aquifer demo sharing --json`.
///
/// The figures of memory and time are those of the first overload, in which host A borrows from
/// host B; `phases` has them for both.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The pages of both loads.
    #[serde(flatten)]
    pub pages: Pages,
    /// The memory and times of the first overload.
    #[serde(flatten)]
    pub usage: Usage,
    /// Every change of a role, of both hosts, in order of time.
    pub roles: Vec<RoleChanged>,
    /// The same figures for each overload.
    pub phases: Vec<Phase>,
}

/// One overload.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// The overloaded host.
    pub borrower: &'static str,
    /// The host that lent.
    pub lender: &'static str,
    /// The pages of its load.
    #[serde(flatten)]
    pub pages: Pages,
    /// Its memory and times.
    #[serde(flatten)]
    pub usage: Usage,
}

/// The pages of loads.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pages {
    /// Pages written.
    pub pages_written: u64,
    /// Pages in which every byte equalled the last write.
    pub pages_verified: u64,
    /// Pages with a byte that differed from the last write.
    pub pages_lost: u64,
}

/// The memory and times of an overload.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Usage {
    /// The most bytes that were swapped out to the other host at a time.
    pub borrowed_peak_bytes: Bytes,
    /// Resident memory (RSS) of the lender's agent before it lent, in bytes.
    pub lender_rss_before_bytes: Bytes,
    /// The highest RSS of that agent, in bytes.
    pub lender_rss_peak_bytes: Bytes,
    /// The RSS of that agent after all memory was given back, in bytes.
    pub lender_rss_after_bytes: Bytes,
    /// Milliseconds from memory above the upper threshold to swapon.
    pub activation_ms: u64,
    /// Milliseconds from the end of the load to swapoff and free memory of the lender.
    pub deactivation_ms: u64,
}

/// A change of a host's role.
#[derive(Clone, Debug, Serialize)]
pub struct RoleChanged {
    /// Seconds since the first change.
    pub at_s: f64,
    /// The host's name.
    pub host: &'static str,
    /// The former role.
    pub from: Role,
    /// The new role.
    pub to: Role,
}

impl Summary {
    pub(super) fn new(verdicts: &[Verdict; 2], seen: &Seen) -> Self {
        let phase = |turn: usize| {
            let (borrower, lender) = (&seen.hosts[turn], &seen.hosts[1 - turn]);
            let Overload { borrowed_peak, lender_rss_peak, lender_rss_after, .. } =
                seen.turns[turn];
            let Verdict { pages_written, pages_verified, pages_lost, .. } = verdicts[turn];
            Phase {
                borrower: borrower.name,
                lender: lender.name,
                pages: Pages { pages_written, pages_verified, pages_lost },
                usage: Usage {
                    borrowed_peak_bytes: borrowed_peak,
                    lender_rss_before_bytes: lender.rss_before,
                    lender_rss_peak_bytes: lender_rss_peak,
                    lender_rss_after_bytes: lender_rss_after,
                    activation_ms: millis(seen.turns[turn].activation()),
                    deactivation_ms: millis(seen.turns[turn].deactivation()),
                },
            }
        };
        let phases = vec![phase(0), phase(1)];
        let sum = |of: fn(&Pages) -> u64| phases.iter().map(|phase| of(&phase.pages)).sum();
        let pages = Pages {
            pages_written: sum(|pages| pages.pages_written),
            pages_verified: sum(|pages| pages.pages_verified),
            pages_lost: sum(|pages| pages.pages_lost),
        };
        Self { pages, usage: phases[0].usage, roles: roles(seen), phases }
    }
}

fn millis(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn roles(seen: &Seen) -> Vec<RoleChanged> {
    let of_host = |host: &super::watch::Watched| {
        let name = host.name;
        host.role_changes
            .iter()
            .map(move |change| RoleChanged {
                at_s: change.at,
                host: name,
                from: change.from,
                to: change.to,
            })
            .collect::<Vec<_>>()
    };
    let mut roles: Vec<_> = seen.hosts.iter().flat_map(of_host).collect();
    roles.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    let first = roles.first().map_or(0.0, |change| change.at_s);
    for change in &mut roles {
        change.at_s = ((change.at_s - first) * 1000.0).round() / 1000.0;
    }
    roles
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for phase in &self.phases {
            let Phase { borrower, lender, pages, usage } = phase;
            let (borrower, lender) = (borrower.to_uppercase(), lender.to_uppercase());
            writeln!(f, "Host {borrower} overloaded, helped by host {lender}:")?;
            writeln!(
                f,
                "  {} pages verified of {} written, {} lost",
                pages.pages_verified, pages.pages_written, pages.pages_lost
            )?;
            writeln!(
                f,
                "  {} swapped out at most; agent of {lender}: {} before, {} at most, {} after",
                usage.borrowed_peak_bytes,
                usage.lender_rss_before_bytes,
                usage.lender_rss_peak_bytes,
                usage.lender_rss_after_bytes
            )?;
            writeln!(
                f,
                "  {} ms to borrow, {} ms to return",
                usage.activation_ms, usage.deactivation_ms
            )?;
        }
        writeln!(f, "Roles:")?;
        for RoleChanged { at_s, host, from, to } in &self.roles {
            writeln!(f, "  {at_s:7.2} s  host {}  {from:8} -> {to}", host.to_uppercase())?;
        }
        Ok(())
    }
}
