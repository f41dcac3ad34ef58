//! Exports that an operator made by hand with `aquifer serve export`.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aquifer_control::ledger::ExportMemory;
use aquifer_page::{Bytes, RegionName};
use aquifer_store::LeaseRecord;

use super::Members;

/// Returns the exports that run on this host. Each marks itself in `run_dir/exports`.
pub(super) fn read(run_dir: &Path, members: &Members) -> Vec<ExportMemory> {
    let marks = fs::read_dir(run_dir.join("exports")).into_iter().flatten().flatten();
    let export = |mark: PathBuf| {
        let name = mark.file_name()?.to_str()?.strip_suffix(".lock")?;
        let pid = name.strip_prefix("export-")?.parse().ok()?;
        let counts = is_locked(&mark) && members.has([pid]);
        counts.then(|| Some(export(name.parse().ok()?, &store_of(&mark)?)))?
    };
    marks.filter_map(|mark| export(mark.path())).collect()
}

/// Returns whether the export of a mark lives. The kernel drops the lock when it ends.
fn is_locked(mark: &Path) -> bool {
    File::open(mark)
        .is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Returns the directory of an export's pages: its own, on the first line of the mark, or the
/// operator's, on the second.
fn store_of(mark: &Path) -> Option<PathBuf> {
    let note = fs::read_to_string(mark).ok()?;
    note.lines().find(|line| !line.is_empty()).map(PathBuf::from)
}

fn export(name: RegionName, store: &Path) -> ExportMemory {
    let mut export = ExportMemory { name, capacity: Bytes::ZERO, stored: Bytes::ZERO };
    for file in fs::read_dir(store).into_iter().flatten().flatten() {
        let path = file.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = fs::read(&path).unwrap_or_default();
            if let Ok(record) = serde_json::from_slice::<LeaseRecord>(&text) {
                let most = record.quota.min(record.capacity);
                export.capacity = export.capacity.saturating_add(most);
            }
        } else {
            // st_blocks counts units of 512 bytes (stat(3type)).
            let taken = file.metadata().map_or(0, |file| file.blocks() * 512);
            export.stored = export.stored.saturating_add(Bytes(taken));
        }
    }
    export
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn a_living_export_counts_with_its_quota() {
        let dir = tempfile::tempdir().unwrap();
        let (marks, store) = (dir.path().join("exports"), dir.path().join("store"));
        fs::create_dir_all(&marks).unwrap();
        fs::create_dir_all(&store).unwrap();
        for quota in [2, 9] {
            let record = LeaseRecord {
                quota: Bytes::gib(quota),
                ..LeaseRecord::new("export".parse().unwrap(), Bytes::gib(4))
            };
            let text = serde_json::to_vec(&record).unwrap();
            fs::write(store.join(format!("{}.json", record.id)), text).unwrap();
            fs::write(store.join(format!("{}.pages", record.id)), [1; 4096]).unwrap();
        }
        let mark = marks.join("export-7.lock");
        fs::write(&mark, format!("\n{}", store.display())).unwrap();
        let all = Members(None);
        assert_eq!(read(dir.path(), &all), [], "its process has ended");

        let held = File::open(&mark).unwrap();
        held.lock().unwrap();
        let found = read(dir.path(), &all);
        let [ExportMemory { name, capacity, stored }] = &found[..] else { panic!("{found:?}") };
        assert_eq!((name.as_str(), *capacity), ("export-7", Bytes::gib(6)));
        assert!(*stored > Bytes::ZERO);
        assert_eq!(read(dir.path(), &Members(Some([8].into()))), [], "in another cgroup");
        assert_eq!(read(dir.path(), &Members(Some([7].into()))).len(), 1);
    }
}
