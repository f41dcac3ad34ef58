//! VMs that have ended, as `aquifer vm list --all` and `aquifer vm show` print them.

use std::path::Path;
use std::time::{Duration, SystemTime};

use aquifer_page::RegionName;
use aquifer_vm::process::{Ended, State, VmStatus, ended};
use serde::Serialize;

use super::defined::Defined;
use crate::failure::{OrFail, Result};
use crate::table::table;

/// A VM of a list: in JSON each has a name and a state.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Listed<'a> {
    Present(&'a VmStatus),
    Off(Defined),
    Gone(Gone),
}

/// A VM that has ended.
#[derive(Debug, Serialize)]
pub(super) struct Gone {
    state: State,
    #[serde(flatten)]
    ended: Ended,
}

impl Gone {
    fn new(ended: Ended) -> Self {
        Self { state: State::Ended(ended.cause.to_string()), ended }
    }
}

/// Returns the VMs of this host, then defined ones that are off, then those that have ended.
/// A VM may have ended while its supervisor still removes its files.
pub(super) fn all(present: &[VmStatus], off: Vec<Defined>, ended: Vec<Ended>) -> Vec<Listed<'_>> {
    let is_recorded = |vm: &VmStatus| ended.iter().any(|ended| ended.name == vm.name);
    let remains = |vm: &&VmStatus| !matches!(vm.state, State::Ended(_)) || !is_recorded(vm);
    let present: Vec<_> = present.iter().filter(remains).collect();
    let gone = ended.into_iter().map(|ended| Listed::Gone(Gone::new(ended)));
    let off = off.into_iter().map(Listed::Off);
    present.into_iter().map(Listed::Present).chain(off).chain(gone).collect()
}

/// Returns the VMs that ended last, oldest first.
pub(super) fn latest(run_dir: &Path) -> Result<Vec<Ended>> {
    ended(run_dir, SystemTime::UNIX_EPOCH).or_fail(|| "reading which VMs have ended")
}

/// Returns how the last VM of this name ended; `None` if there is no record.
pub(super) fn last(run_dir: &Path, name: &RegionName) -> Result<Option<Gone>> {
    let last = latest(run_dir)?.into_iter().rfind(|ended| ended.name == *name);
    Ok(last.map(Gone::new))
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

pub(super) fn text(Gone { ended, .. }: &Gone) -> String {
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
