//! The ages of the keys of leases, and the keys that the operator wants replaced, in a file for the
//! next agent.
//!
//! Ages count the time that agents ran, so no clock that jumps can change them. The file is not
//! part of the leases' records: processes of an older version refuse records that they do not know.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_control::node::KeySettings;
use aquifer_page::{LeaseId, file};
use serde::{Deserialize, Serialize};

/// How often the ages are written. A killed agent loses that much of them.
const PERIOD: Duration = Duration::from_secs(10);

/// The file about keys.
#[derive(Debug)]
pub(super) struct KeyAges {
    path: PathBuf,
    written: Option<Instant>,
    ordered: BTreeSet<LeaseId>,
    /// Whether the last attempt to write failed.
    has_failed: bool,
}

/// What is in the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Notes {
    /// The age of each lease's key, in seconds.
    ages: BTreeMap<LeaseId, u64>,
    /// The leases whose keys the operator wants replaced.
    ordered: BTreeSet<LeaseId>,
}

impl KeyAges {
    pub(super) fn of(state: &Path) -> Self {
        let path = state.join("key-ages.json");
        Self { path, written: None, ordered: BTreeSet::new(), has_failed: false }
    }

    /// Returns what the previous agent wrote, if it did. The caller chooses the lifetime of keys.
    pub(super) fn read(&self) -> KeySettings {
        let parsed = match fs::read(&self.path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| error.to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Notes::default()),
            Err(error) => Err(error.to_string()),
        };
        let Notes { ages, ordered } = parsed.unwrap_or_else(|error| {
            let path = self.path.display();
            tracing::warn!("cannot read {path}, so all keys of leases count as new: {error}");
            Notes::default()
        });
        let ages = ages.into_iter().map(|(lease, age)| (lease, Duration::from_secs(age)));
        KeySettings { lifetime: None, ages: ages.collect(), ordered }
    }

    /// Writes the ages, unless that was done a moment ago, and orders at once.
    pub(super) fn keep(&mut self, ages: &BTreeMap<LeaseId, Duration>, ordered: &BTreeSet<LeaseId>) {
        let is_recent = self.written.is_some_and(|at| at.elapsed() < PERIOD);
        if is_recent && self.ordered == *ordered {
            return;
        }
        let is_first = self.written.replace(Instant::now()).is_none();
        self.ordered.clone_from(ordered);
        if is_first && ages.is_empty() {
            // Most hosts hold no lease.
            return;
        }
        let ages = ages.iter().map(|(lease, age)| (*lease, age.as_secs())).collect();
        let written = serde_json::to_vec(&Notes { ages, ordered: ordered.clone() })
            .map_err(|error| error.to_string())
            .and_then(|text| file::replace(&self.path, &text).map_err(|error| error.to_string()));
        let had_failed = std::mem::replace(&mut self.has_failed, written.is_err());
        if let Err(error) = written
            && !had_failed
        {
            tracing::warn!("cannot write {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_agent_knows_ages_and_orders() {
        let dir = tempfile::tempdir().unwrap();
        assert!(KeyAges::of(dir.path()).read().ages.is_empty());
        let ages = BTreeMap::from([(LeaseId(7), Duration::from_secs(2_592_000))]);
        let mut file = KeyAges::of(dir.path());
        file.keep(&ages, &BTreeSet::new());
        let read = KeyAges::of(dir.path()).read();
        assert_eq!((&read.ages, read.ordered.len()), (&ages, 0));
        // An order does not wait.
        let ordered = BTreeSet::from([LeaseId(7)]);
        file.keep(&ages, &ordered);
        let read = KeyAges::of(dir.path()).read();
        assert_eq!((read.ages, read.ordered), (ages, ordered));
    }

    #[test]
    fn a_broken_file_makes_keys_new() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("key-ages.json"), "{\"x\": -1}").unwrap();
        assert!(KeyAges::of(dir.path()).read().ages.is_empty());
    }
}
