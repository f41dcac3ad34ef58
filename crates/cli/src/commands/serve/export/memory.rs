//! The pages of `aquifer serve export`: a store with one lease for each name.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_page::{Bytes, HostName, LeaseId, PAGE_SIZE};
use aquifer_store::{Finding, Lease, LeaseRecord, Store};
use serde_json::json;

use super::Export;
use crate::agent_call::Socket;
use crate::claim::Claimed;
use crate::commands::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;

/// The pages of an export; their drop removes them.
pub(super) struct ExportMemory {
    pub(super) store: Arc<Store>,
    /// One lease for each name.
    pub(super) leases: Vec<Arc<Lease>>,
    /// The capacity of each lease.
    pub(super) capacity: Bytes,
    /// The directory to remove; `None` for a directory that the user gave.
    pub(super) own_dir: Option<PathBuf>,
    /// Whether a killed export left these leases. If this export fails to start, they stay.
    was_left: bool,
    /// Whether warnings are JSON.
    json: bool,
}

impl ExportMemory {
    /// Makes the pages. For new ones it asks this host's agent for room.
    pub(super) fn make(
        export: &Export,
        instance: &mut Instance,
        common: &Common,
    ) -> Result<(Self, Option<Claimed>)> {
        let (what, json) = (|| format!("exporting {}", export.size), common.json);
        let (dir, own_dir) = match &export.dir {
            Some(dir) => {
                // On the second line: the first names a directory to remove.
                let place = std::path::absolute(dir).or_fail(what)?;
                instance.note(&format!("\n{}", place.display())).or_fail(what)?;
                (dir.clone(), None)
            }
            None => {
                let own = stores(std::env::var_os("XDG_RUNTIME_DIR")).ok_or_else(|| {
                    let why = "pages need a directory in RAM, and XDG_RUNTIME_DIR names none";
                    Failure::new(what(), why)
                        .help("run as root, or name your own directory on a tmpfs with --dir")
                })?;
                // A new one: ids of processes come round, and each PID namespace has its own.
                let number = LeaseId::random().0 as u32;
                let own = own.join(format!("{}-{number:08x}", instance.name()));
                instance.note(&own.to_string_lossy()).or_fail(what)?;
                (own.clone(), Some(own))
            }
        };
        let store = Store::open(&dir).or_fail(what)?;
        let capacity = Bytes(export.size.pages() * PAGE_SIZE as u64);
        let borrower = HostName::try_from("export".to_owned()).or_fail(what)?;
        let record = |name: &String| LeaseRecord {
            quota: export.quota.unwrap_or(capacity),
            shared: export.share,
            note: json!({ "export": name }),
            ..LeaseRecord::new(borrower.clone(), capacity)
        };
        let records: Vec<_> = export.names.iter().map(record).collect();
        let left = left_in(&store, &records)
            .map_err(|(why, help)| Failure::new(what(), why).help(help))?;
        let was_left = !left.is_empty();
        // If a later step fails, the drop of `memory` removes what is there by then.
        let store = Arc::new(store);
        let mut memory = Self { store, leases: left, capacity, own_dir, was_left, json };
        // Pages that are there already are not refused.
        let claimed =
            if was_left { None } else { Some(claim(export, instance, common, &records)?) };
        if !was_left {
            for record in records {
                let lease = memory.store.create(record).or_fail(what)?;
                memory.leases.push(lease);
            }
        }
        let store = &memory.store;
        if store.is_swappable() {
            let why = "this user may not lock enough memory: the kernel may swap out stored pages";
            Failure::new(what(), why).help("run as root, or raise RLIMIT_MEMLOCK").warn(json);
        }
        Ok((memory, claimed))
    }

    pub(super) fn remove(mut self) -> Result<()> {
        self.remove_all().or_fail(|| "freeing the export's memory")
    }

    fn remove_all(&mut self) -> Result<(), aquifer_store::StoreError> {
        for lease in self.leases.drain(..) {
            self.store.remove(lease.id())?;
        }
        if let Some(dir) = self.own_dir.take() {
            remove_dir(&dir, self.json);
        }
        Ok(())
    }
}

impl Drop for ExportMemory {
    fn drop(&mut self) {
        // A drop cannot report. The next export removes the rest.
        if !self.was_left {
            let _ = self.remove_all();
        }
    }
}

/// Asks this host's agent for room.
fn claim(
    export: &Export,
    instance: &Instance,
    common: &Common,
    records: &[LeaseRecord],
) -> Result<Claimed> {
    let what = || format!("exporting {}", export.size);
    let name = instance.name().parse().or_fail(what)?;
    let bytes = records.iter().map(|record| record.quota.min(record.capacity)).sum();
    let pid = Some(std::process::id());
    let claim = Claim { pid, ..Claim::new(name, ClaimPurpose::Export, bytes) };
    export.overcommit.claim(common, &Socket::of_environment(), &what(), claim)
}

/// Returns the leases that a killed export with these records left, in the order of `records`.
///
/// An empty store gives no leases. Any other store is an error: the reason, and a help text.
fn left_in(
    store: &Store,
    records: &[LeaseRecord],
) -> std::result::Result<Vec<Arc<Lease>>, (String, &'static str)> {
    let dir = store.dir().display();
    let lost = |finding: &&Finding| {
        matches!(finding, Finding::Unusable(..) | Finding::RecordWithoutPages(_))
    };
    if let Some(lost) = store.findings().iter().find(lost) {
        return Err((format!("{dir}: {lost}"), "choose another directory with --dir"));
    }
    let all = store.leases();
    let left = records.iter().map(|record| {
        let same = |lease: &&Arc<Lease>| {
            let there = lease.record();
            let (claim, ousted) = (there.claim.clone(), there.ousted.clone());
            LeaseRecord { id: there.id, claim, ousted, ..record.clone() } == there
        };
        all.iter().find(same).cloned()
    });
    match left.collect() {
        _ if all.is_empty() => Ok(Vec::new()),
        Some(left) if all.len() == records.len() => Ok(left),
        _ => Err((
            format!("{dir} holds leases of an agent, or of an export with another name or size"),
            "choose another directory with --dir, or repeat the arguments of the killed export",
        )),
    }
}

/// Removes the directories that killed exports left.
pub(super) fn clean_up(marks: &Path, json: bool) {
    for dead in Instance::dead(marks, "export").unwrap_or_default() {
        if let Ok(dir) = dead.read_note() {
            remove_dir(Path::new(dir.lines().next().unwrap_or_default()), json);
        }
    }
}

/// Returns where exports of this user have their directories; `runtime` is XDG_RUNTIME_DIR.
fn stores(runtime: Option<OsString>) -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/dev/shm/aquifer".into());
    }
    runtime
        .map(PathBuf::from)
        .filter(|runtime| runtime.is_absolute())
        .map(|runtime| runtime.join("aquifer"))
}

/// Removes an export's own directory and no other: another process may have written the note.
fn remove_dir(dir: &Path, json: bool) {
    let stores = stores(std::env::var_os("XDG_RUNTIME_DIR"));
    let own = stores.is_some_and(|stores| dir.parent() == Some(&stores))
        && dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("export-"));
    if own
        && let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        Failure::new(format!("removing {}", dir.display()), error).warn(json);
    }
}
