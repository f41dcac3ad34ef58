//! VMs that have ended, as `aquifer vm list --all` and `aquifer vm show` print them.

use std::path::Path;
use std::time::{Duration, SystemTime};

use aquifer_page::RegionName;
use aquifer_vm::process::{Ended, VmStatus, ended};
use serde::Serialize;

use crate::failure::{OrFail, Result};
use crate::table::table;

/// The VMs of a host, and those that have ended.
#[derive(Debug, Serialize)]
pub(super) struct All {
    pub(super) vms: Vec<VmStatus>,
    pub(super) ended: Vec<Ended>,
}

/// A VM that has ended.
#[derive(Debug, Serialize)]
pub(super) struct Last {
    pub(super) ended: Ended,
}

/// Returns the VMs that ended last, oldest first.
pub(super) fn latest(run_dir: &Path) -> Result<Vec<Ended>> {
    ended(run_dir, SystemTime::UNIX_EPOCH).or_fail(|| "reading which VMs have ended")
}

/// Returns how the last VM of this name ended; `None` if there is no record.
pub(super) fn last(run_dir: &Path, name: &RegionName) -> Result<Option<Last>> {
    let last = latest(run_dir)?.into_iter().rfind(|ended| ended.name == *name);
    Ok(last.map(|ended| Last { ended }))
}

fn at(ended: &Ended) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(ended.at_ms);
    humantime::format_rfc3339_seconds(at).to_string()
}

pub(super) fn listed(all: &[Ended]) -> String {
    if all.is_empty() {
        return "no ended VM is on record".to_owned();
    }
    let row = |ended: &Ended| [ended.name.to_string(), at(ended), ended.cause.to_string()];
    table(["ENDED", "AT", "WHY"], all.iter().map(row))
}

pub(super) fn text(Last { ended }: &Last) -> String {
    let mut text = format!(
        "vm          {}, ended\nat          {}\nwhy         {}",
        ended.name,
        at(ended),
        ended.cause
    );
    if let Some(status) = &ended.status {
        text.push_str(&format!("\nqemu        {status}"));
    }
    if !ended.words.is_empty() {
        text.push_str(&format!("\nlog         {}", ended.words));
    }
    text
}
