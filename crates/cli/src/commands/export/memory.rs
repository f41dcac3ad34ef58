use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_page::{Bytes, HostName, PAGE_SIZE};
use aquifer_store::{Lease, LeaseRecord, Store};

use super::Export;
use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;

/// The pages, which are gone when this is dropped.
pub(super) struct Memory {
    pub(super) store: Arc<Store>,
    /// One for each name.
    pub(super) leases: Vec<Arc<Lease>>,
    /// Of each.
    pub(super) capacity: Bytes,
    /// The directory to remove: only one of its own.
    own_dir: Option<PathBuf>,
}

impl Memory {
    pub(super) fn make(export: &Export, instance: &Instance) -> Result<Self> {
        let what = || format!("exporting {}", export.size);
        let own_dir = Path::new("/dev/shm/aquifer").join(instance.name());
        let dir = export.dir.clone().unwrap_or_else(|| own_dir.clone());
        let own_dir = export.dir.is_none().then_some(own_dir);
        if let Some(own) = &own_dir {
            instance.note(&own.to_string_lossy()).or_fail(what)?;
        }
        let store = Store::open(&dir).or_fail(what)?;
        if !store.leases().is_empty() {
            let why = format!("{} holds leases of an agent", dir.display());
            return Err(Failure::new(what(), why).help("give another directory by --dir"));
        }
        let capacity = Bytes(export.size.pages() * PAGE_SIZE as u64);
        let borrower = HostName::try_from("export".to_owned()).or_fail(what)?;
        let record = || LeaseRecord {
            quota: export.quota.unwrap_or(capacity),
            shared: export.share,
            ..LeaseRecord::new(borrower.clone(), capacity)
        };
        // What was made before one fails goes with this.
        let mut memory = Self { store: Arc::new(store), leases: Vec::new(), capacity, own_dir };
        for _ in &export.names {
            let lease = memory.store.create(record()).or_fail(what)?;
            memory.leases.push(lease);
        }
        let store = &memory.store;
        if store.is_swappable() {
            let why = "the kernel does not let this user lock enough memory: what is stored here may be swapped out";
            Failure::new("warning", why).help("run as root, or raise RLIMIT_MEMLOCK").report(false);
        }
        Ok(memory)
    }

    pub(super) fn remove(mut self) -> Result<()> {
        self.remove_all().or_fail(|| "giving the memory back")
    }

    fn remove_all(&mut self) -> Result<(), aquifer_store::StoreError> {
        for lease in self.leases.drain(..) {
            self.store.remove(lease.id())?;
        }
        if let Some(dir) = self.own_dir.take() {
            remove_dir(&dir);
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Nobody is left to tell; the next export removes what is left.
        let _ = self.remove_all();
    }
}

/// Removes what exports that were killed left.
pub(super) fn clean_up(marks: &Path) {
    for dead in Instance::dead(marks, "export").unwrap_or_default() {
        if let Ok(dir) = dead.read_note() {
            remove_dir(Path::new(&dir));
        }
    }
}

/// Removes an export's own directory. Only below /dev/shm: a note is a file that somebody may have written to.
fn remove_dir(dir: &Path) {
    let own = dir.parent() == Some(Path::new("/dev/shm/aquifer"))
        && dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("export-"));
    if own
        && let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        Failure::new(format!("removing {}", dir.display()), error).report(false);
    }
}
