//! The remains of killed runs: processes, a cgroup, swap.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::pool::{Pool, Volume};
use crate::cgroup::{Cgroup, Hierarchy};
use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;

/// The remains to remove if a run is killed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Note {
    /// The name of its cgroup.
    pub cgroup: String,
    /// The volume of its swap; `None` if it has none.
    pub volume: Option<Volume>,
}

impl Note {
    /// Writes the note into the run's mark.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn leave(&self, instance: &mut Instance) -> Result<()> {
        let what = || "recording what to clean up after the command";
        let text = serde_json::to_string(self).or_fail(what)?;
        instance.note(&text).or_fail(what)
    }

    fn read(instance: &Instance) -> Result<Option<Self>> {
        let text = instance.read_note().or_fail(|| "reading the record of a killed run")?;
        // A run that was killed before its first note had made nothing.
        Ok(serde_json::from_str(&text).ok())
    }
}

/// Removes the remains of killed runs. Warns of a failure; the next run tries again.
pub fn clean_up(marks: &Path, hierarchy: &Hierarchy, pool: &Pool, json: bool) {
    let dead = match Instance::dead(marks, "run") {
        Ok(dead) => dead,
        Err(error) => return Failure::new("looking for killed runs", error).warn(json),
    };
    for instance in dead {
        if let Err(failure) = clean_up_after(&instance, hierarchy, pool) {
            failure.warn(json);
            instance.keep();
        }
    }
}

fn clean_up_after(instance: &Instance, hierarchy: &Hierarchy, pool: &Pool) -> Result<()> {
    let Some(note) = Note::read(instance)? else { return Ok(()) };
    let what = || format!("cleaning up after {}, which was killed", instance.name());
    if let Some(cgroup) = Cgroup::adopt(hierarchy, &note.cgroup) {
        cgroup.remove().or_fail(what)?;
    }
    note.volume.map_or(Ok(()), |volume| pool.release(volume))
}
