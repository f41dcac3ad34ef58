//! The ages of the keys of leases, in a file for the next agent.
//!
//! Ages count the time that agents ran, so no clock that jumps can change them. The file is not
//! part of the leases' records: processes of an older version refuse records that they do not know.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_page::{LeaseId, file};

/// How often the ages are written. A killed agent loses that much of them.
const PERIOD: Duration = Duration::from_secs(10);

/// The file with the ages of keys.
#[derive(Debug)]
pub(super) struct KeyAges {
    path: PathBuf,
    written: Option<Instant>,
}

impl KeyAges {
    pub(super) fn of(state: &Path) -> Self {
        Self { path: state.join("key-ages.json"), written: None }
    }

    /// Returns the ages that the previous agent wrote; none if it wrote none.
    pub(super) fn read(&self) -> BTreeMap<LeaseId, Duration> {
        let parsed = match fs::read(&self.path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| error.to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(error.to_string()),
        };
        let seconds: BTreeMap<LeaseId, u64> = parsed.unwrap_or_else(|error| {
            let path = self.path.display();
            tracing::warn!("cannot read {path}, so all keys of leases count as new: {error}");
            BTreeMap::new()
        });
        seconds.into_iter().map(|(lease, age)| (lease, Duration::from_secs(age))).collect()
    }

    /// Writes the ages, unless that was done a moment ago.
    pub(super) fn keep(&mut self, ages: &BTreeMap<LeaseId, Duration>) {
        if self.written.is_some_and(|at| at.elapsed() < PERIOD) {
            return;
        }
        let is_first = self.written.replace(Instant::now()).is_none();
        if is_first && ages.is_empty() {
            // Most hosts hold no lease.
            return;
        }
        let seconds: BTreeMap<_, _> =
            ages.iter().map(|(lease, age)| (lease, age.as_secs())).collect();
        let written = serde_json::to_vec(&seconds)
            .map_err(|error| error.to_string())
            .and_then(|text| file::replace(&self.path, &text).map_err(|error| error.to_string()));
        if let Err(error) = written {
            tracing::warn!("cannot write {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_agent_knows_the_ages() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(KeyAges::of(dir.path()).read(), BTreeMap::new());
        let ages = BTreeMap::from([(LeaseId(7), Duration::from_secs(2_592_000))]);
        KeyAges::of(dir.path()).keep(&ages);
        assert_eq!(KeyAges::of(dir.path()).read(), ages);
    }

    #[test]
    fn a_broken_file_makes_keys_new() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("key-ages.json"), "{\"x\": -1}").unwrap();
        assert_eq!(KeyAges::of(dir.path()).read(), BTreeMap::new());
    }
}
