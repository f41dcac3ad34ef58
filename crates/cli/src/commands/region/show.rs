//! The text that shows regions to people.

use std::fmt::Write as _;

use aquifer_page::{Bytes, RegionName};
use aquifer_region::Usage;
use aquifer_region::process::{Files, Latency, RegionSpec, RegionStatus, client};
use aquifer_volume::{CopyStatus, DiskCopyStatus, RingStatus};
use serde::Serialize;

use super::directory;
use crate::commands::Common;
use crate::failure::{OrFail as _, Result, is_denied};
use crate::table::table;

/// One region in the list.
#[derive(Debug, Serialize)]
pub(crate) struct Listed {
    name: RegionName,
    /// The specification that it was made with; `None` if it cannot be read.
    spec: Option<RegionSpec>,
    /// Its state; `None` if no engine serves it.
    status: Option<RegionStatus>,
}

impl Listed {
    /// Returns all regions of this host.
    pub(crate) fn all(common: &Common) -> Result<Vec<Self>> {
        let all = client::list(&directory(common)?).or_fail(|| "listing regions")?;
        all.iter().map(Self::of).collect()
    }

    fn of(files: &Files) -> Result<Self> {
        let name = files.name().clone();
        let spec = match client::record(files) {
            Err(error) if is_denied(&error) => {
                return Err(error).or_fail(|| format!("querying region '{name}'"));
            }
            record => record.ok().map(RegionSpec::without_keys),
        };
        Ok(Self { name, spec, status: client::status(files).ok() })
    }
}

pub(crate) fn listed(all: &[Listed]) -> String {
    if all.is_empty() {
        return "no regions: 'aquifer region create' creates one".to_owned();
    }
    let row = |region: &Listed| {
        let mut row = vec![
            region.name.to_string(),
            region.spec.as_ref().map_or_else(|| "-".to_owned(), |spec| spec.size.to_string()),
        ];
        row.extend(cells(region.status.as_ref().map(|status| status.usage)));
        let (state, programs) = match &region.status {
            None => ("no engine serves it".to_owned(), "-".to_owned()),
            Some(RegionStatus { waiting: 0, programs, .. }) => {
                ("served".to_owned(), mapped_by(programs))
            }
            Some(RegionStatus { waiting, programs, .. }) => {
                (format!("{waiting} faults WAIT for a lender"), mapped_by(programs))
            }
        };
        row.extend([state, programs]);
        row
    };
    table(
        ["NAME", "SIZE", "CACHE", "RESIDENT", "REMOTE", "ZERO", "STATE", "MAPPED BY"],
        all.iter().map(row),
    )
}

/// Describes the second copy of a lease's pages.
pub(crate) fn copied(copy: &CopyStatus) -> String {
    let CopyStatus { lender, address, answer, lacks, first_lacks, late_reads, ring, .. } = copy;
    let mut state = Vec::new();
    if !answer.1 {
        state.push("does not answer".to_owned());
    }
    match *lacks {
        Bytes::ZERO if answer.1 => state.push("complete".to_owned()),
        Bytes::ZERO => {}
        lacks => state.push(format!("lacks {lacks}")),
    }
    if *first_lacks > Bytes::ZERO {
        state.push(format!("alone has {first_lacks}"));
    }
    if *late_reads > 0 {
        state.push(format!("{late_reads} reads asked both lenders, as one was late"));
    }
    if let Some(RingStatus { size, used }) = ring {
        state.push(format!("{used} on the way there, in {size} of locked memory"));
    }
    format!("{lender} at {address}: {}", state.join(", "))
}

/// Describes the copy of a lease's pages on this host's disk.
fn on_disk(copy: &DiskCopyStatus) -> String {
    let DiskCopyStatus { path, held, in_ring, lacks, lender_lacks, paused, .. } = copy;
    let mut state = vec![format!("{held}, of which {in_ring} is still in memory")];
    if *lacks > Bytes::ZERO {
        state.push(format!("lacks {lacks}"));
    }
    if *lender_lacks > Bytes::ZERO {
        state.push(format!("alone has {lender_lacks}"));
    }
    if let Some(why) = paused {
        state.push(format!("PAUSED: {why}"));
    }
    format!("{}: {}", path.display(), state.join(", "))
}

fn mapped_by(programs: &[String]) -> String {
    if programs.is_empty() { "no program".to_owned() } else { programs.join(", ") }
}

/// Returns the cache limit, and the resident, remote and zero bytes; "-" where they are unknown.
pub(crate) fn cells(usage: Option<Usage>) -> [String; 4] {
    let Some(Usage { cache, resident, remote, zero, .. }) = usage else {
        return ["-"; 4].map(str::to_owned);
    };
    [cache, resident, remote, zero].map(|bytes| bytes.to_string())
}

pub(crate) fn text(files: &Files, status: &RegionStatus) -> String {
    let RegionStatus { spec, usage, counts, fetches, .. } = status;
    let mut text = String::new();
    let mut line = |name: &str, value: String| _ = writeln!(text, "{name:<12}{value}");
    let seconds = status.uptime_ms as f64 / 1000.0;
    let faults = counts.zero_faults + counts.remote_faults + counts.second_chances;
    line("region", format!("{} ({})", spec.name, files.region().display()));
    line("size", format!("{}, at most {} of it in local RAM", usage.size, usage.cache));
    line("resident", format!("{}, of which {} is known to be dirty", usage.resident, usage.dirty));
    line("remote", usage.remote.to_string());
    if let Some(spill) = status.volume.spill.filter(|spill| spill.used_extents > 0) {
        line("spilled", format!("{} of that in a file on this host's disk", spill.held));
    }
    if usage.shared > Bytes::ZERO {
        line("shared", format!("{} with regions of its group, outside the cache", usage.shared));
    }
    line("zero", usage.zero.to_string());
    line("mapped by", mapped_by(&status.programs));
    line(
        "engine",
        format!("process {}, up {seconds:.0} s; {} policy", status.pid, spec.paging.policy),
    );
    line(
        "faults",
        format!(
            "{faults} ({:.0} a second): {} fetched, {} zero pages, {} second chances; \
             {:.1} % of pages with content were in the cache",
            faults as f64 / seconds.max(0.001),
            counts.remote_faults,
            counts.zero_faults,
            counts.second_chances,
            100.0 * status.hit_rate
        ),
    );
    line(
        "prefetched",
        format!(
            "{} fetched: {} used, {} unused; {} zero pages ({})",
            counts.prefetched,
            counts.prefetch_used,
            counts.prefetch_wasted,
            counts.zeroed,
            spec.paging.prefetch
        ),
    );
    if let Some(link) = &spec.paging.link {
        let how = if link.one_at_a_time { "one at a time" } else { "in parallel" };
        let took = fetches.link.unwrap_or_default();
        let what = format!("emulated: {:?} per page, {how}", link.latency);
        line("link", format!("{what}; p50 {:.2} us, p99 {:.2} us", took.p50_us, took.p99_us));
    }
    if counts.given_up > 0 {
        line("timed out", format!("{} faults, ended with SIGBUS", counts.given_up));
    }
    line(
        "evicted",
        format!(
            "{}; {} written back, {} found zero",
            counts.evicted, counts.written_back, counts.found_zero
        ),
    );
    let Latency { p50_us, p99_us, p999_us, .. } = fetches.latency;
    line("fetches", format!("p50 {p50_us:.0} us, p99 {p99_us:.0} us, p99.9 {p999_us:.0} us"));
    if status.waiting > 0 {
        line("WAITING", format!("{} faults wait for an unreachable lender", status.waiting));
    }
    for lease in &status.volume.leases {
        let encrypted = lease
            .encryption
            .map_or("not encrypted".to_owned(), |mode| format!("encrypted, {mode}"));
        let (lender, address, state) = (&lease.lender, &lease.address, &lease.state);
        let is_silent = lease.copy.as_ref().is_some_and(|copy| !copy.answer.0)
            || lease.disk.as_ref().is_some_and(|copy| !copy.lender_answers);
        let state = if is_silent { "does not answer".to_owned() } else { state.to_string() };
        line("lender", format!("{lender} at {address}: {state}, {encrypted}"));
        let is_recorded = spec.copies.iter().any(|copy| copy.of == lease.lease);
        match &lease.copy {
            Some(copy) => line("copy", copied(copy)),
            None if is_recorded => line("copy", "NOT IN USE: the log says why".to_owned()),
            None => {}
        }
        lease.disk.iter().for_each(|copy| line("on disk", on_disk(copy)));
    }
    if let Some(error) = &status.volume.last_error {
        line("last error", error.clone());
    }
    text.trim_end().to_owned()
}
