//! Figures of sharing and of a scanner.

use std::collections::HashMap;
use std::path::Path;

use aquifer_control::group::scan_rate::{Rate, RateDecision};
use aquifer_page::{Bytes, FrameIndex, Group, PAGE_SIZE};
use aquifer_region::process::client;
use serde::{Deserialize, Serialize};

use crate::member::{Member, Members};
use crate::{Counts, ScanError};

/// The sharing of a group's regions on a host, counted exactly from the engines' records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sharing {
    /// Number of the group's regions.
    pub regions: u64,
    /// Memory of the regions that is in frames of the group.
    pub shared_bytes: Bytes,
    /// Memory that those frames take.
    pub frames_bytes: Bytes,
    /// `shared_bytes` less `frames_bytes`.
    pub saved_bytes: Bytes,
    /// Shared pages that a write has unshared (copy-on-write), since the engines started.
    pub broken: u64,
    /// Mappings for each shared page: 1 if no two adjacent pages are in adjacent frames.
    pub mappings_per_page: f64,
}

impl Sharing {
    /// Counts the sharing of `members`; `sharers` holds the number of pages of each frame.
    pub fn of(members: &Members, sharers: &HashMap<FrameIndex, u64>) -> Self {
        let (mut broken, mut runs) = (0, 0);
        for member in &members.all {
            broken += member.broken();
            runs += member.runs();
        }
        let bytes = |pages: u64| Bytes(pages * PAGE_SIZE as u64);
        let (pages, distinct) = (sharers.values().sum(), sharers.len() as u64);
        Self {
            regions: members.all.len() as u64,
            shared_bytes: bytes(pages),
            frames_bytes: bytes(distinct),
            saved_bytes: bytes(pages - distinct),
            broken,
            mappings_per_page: if pages == 0 { 0.0 } else { runs as f64 / pages as f64 },
        }
    }
}

/// Returns the sharing of a group on this host, whether or not a scanner is at work.
///
/// # Errors
/// [`ScanError::Region`] if the regions cannot be listed or read.
pub fn sharing(directory: &Path, group: &Group) -> Result<Sharing, ScanError> {
    let mut members = Members::new(directory, group);
    for files in client::list(directory)? {
        members.all.extend(Member::of(&files, group)?);
    }
    Ok(Sharing::of(&members, &members.sharers()))
}

/// The report of a scanner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScanReport {
    /// The group.
    pub group: Group,
    /// The group that pays: this one, or one that has borrowed its savings.
    pub payer: Group,
    /// The group's sharing.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// Rate of scanning from now on.
    pub scan_pages_per_ms: Rate,
    /// The decision about the rate.
    pub why: RateDecision,
    /// CPU time of the scanner in the last period, in percent of one processor.
    pub scanner_cpu_pct: f64,
    /// Pages looked at, or skipped because they are shared, since the start.
    pub scanned: u64,
    /// Pages that became shared.
    pub merged: u64,
    /// Pages of zeroes whose memory was freed.
    pub zero: u64,
    /// Passes over all pages.
    pub passes: u64,
}

impl ScanReport {
    pub(crate) fn new(
        (group, payer): (&Group, &Group),
        sharing: Sharing,
        counts: &Counts,
        why: RateDecision,
        cpu: f64,
    ) -> Self {
        let Counts { scanned, merged, zero, passes, .. } = *counts;
        Self {
            group: group.clone(),
            payer: payer.clone(),
            sharing,
            scan_pages_per_ms: why.to,
            why,
            scanner_cpu_pct: cpu,
            scanned,
            merged,
            zero,
            passes,
        }
    }
}
