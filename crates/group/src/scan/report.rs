//! What sharing saves, in numbers.

use std::collections::HashMap;
use std::path::Path;

use aquifer_control::group::scan_rate::{Rate, Verdict};
use aquifer_page::{Bytes, Group, PAGE_SIZE};
use aquifer_region::process::client;
use serde::{Deserialize, Serialize};

use super::{Counts, ScanError};
use crate::member::{Member, Members};

/// What the regions of a group share on a host: counted from their records, exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sharing {
    /// Regions of the group.
    pub regions: u64,
    /// Of their memory, what is kept in frames of the group.
    pub shared_bytes: Bytes,
    /// What those frames take.
    pub frames_bytes: Bytes,
    /// The difference.
    pub saved_bytes: Bytes,
    /// Pages that were shared until somebody wrote to them, since the engines started.
    pub broken: u64,
    /// Mappings that shared pages take, for each of them: 1 where none follows another one.
    pub mappings_per_page: f64,
}

impl Sharing {
    /// That of these, of whose frames each is so many pages.
    pub(crate) fn of(members: &Members, sharers: &HashMap<u64, u64>) -> Self {
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

/// What a group shares on this host, whether it is being looked for more or not.
///
/// # Errors
/// [`ScanError`].
pub fn sharing(directory: &Path, group: &Group) -> Result<Sharing, ScanError> {
    let mut members = Members::new(directory, group);
    for files in client::list(directory)? {
        members.all.extend(Member::of(&files, group)?);
    }
    Ok(Sharing::of(&members, &members.sharers()))
}

/// How a scanner is doing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The group.
    pub group: Group,
    /// Who pays for it: this group, or one that has borrowed what it saves.
    pub payer: Group,
    /// What it shares.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// How fast pages are looked at from now on.
    pub scan_pages_per_ms: Rate,
    /// And why.
    pub why: Verdict,
    /// CPU of the scanner, of one processor, in the last period.
    pub scanner_cpu_pct: f64,
    /// Pages looked at, or passed over as they are shared, since it started.
    pub scanned: u64,
    /// Of these, how many came to be shared.
    pub merged: u64,
    /// And how many were of zeroes, and take nothing since.
    pub zero: u64,
    /// Passes over all pages.
    pub passes: u64,
}

impl Report {
    pub(super) fn new(
        (group, payer): (&Group, &Group),
        sharing: Sharing,
        counts: &Counts,
        why: Verdict,
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
