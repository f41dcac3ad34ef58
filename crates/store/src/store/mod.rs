//! The store: all leases of a lender.

mod finding;
mod locking;
mod recover;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE, lock};

pub use self::finding::Finding;
use crate::dir::{Dir, Entry};
use crate::lease::Pages;
use crate::ram::RamLock;
use crate::sharing::{Groups, SharedPages};
use crate::sys::{PrivatePages, Table};
use crate::{Lease, LeaseRecord, StoreError, Usage};

/// All leases of a lender: a directory on a tmpfs, served by one process at a time.
///
/// Dropping the store leaves the leases and their pages for the next [`Store::open`].
#[derive(Debug)]
pub struct Store {
    dir: Arc<Dir>,
    leases: Mutex<BTreeMap<LeaseId, Arc<Lease>>>,
    groups: Groups,
    findings: Vec<Finding>,
    ram: Arc<RamLock>,
}

impl Store {
    /// Opens the store in `dir`, makes the directory if necessary, and recovers the leases with all
    /// their pages. The caller can serve them at once; a thread locks their pages in RAM.
    ///
    /// # Errors
    /// [`StoreError::NotTmpfs`], [`StoreError::Unguarded`], [`StoreError::Busy`],
    /// [`StoreError::File`]. A single lease that cannot be recovered is no error but a
    /// [finding](Self::findings).
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let (store, recovered) = Self::recovered(dir)?;
        locking::start(recovered, Arc::clone(&store.ram));
        Ok(store)
    }

    /// Returns the store, and the pages that are still to be locked in RAM.
    fn recovered(dir: &Path) -> Result<(Self, Vec<Weak<PrivatePages>>), StoreError> {
        let dir = Arc::new(Dir::lock(dir)?);
        let ram = Arc::new(RamLock::new(dir.path().to_owned()));
        let groups = Groups::new(Arc::clone(&dir), Arc::clone(&ram));
        let mut store = Self { dir, leases: Mutex::default(), groups, findings: Vec::new(), ram };
        store.recover()?;
        for finding in &store.findings {
            tracing::warn!(dir = %store.dir.path().display(), "{finding}");
        }
        let pages = |lease: &Arc<Lease>| match lease.pages() {
            Pages::Private(private) => Some(Arc::downgrade(private)),
            Pages::Shared(_) => None,
        };
        let recovered = store.leases().iter().filter_map(pages).collect();
        Ok((store, recovered))
    }

    /// Returns the anomalies that the open found.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns the store's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns whether the kernel may swap out stored pages, because it does not let this process
    /// lock them in RAM.
    pub fn is_swappable(&self) -> bool {
        self.ram.was_refused()
    }

    /// Makes a new, empty lease.
    ///
    /// # Errors
    /// [`StoreError::Exists`], [`StoreError::Capacity`], [`StoreError::File`].
    pub fn create(&self, record: LeaseRecord) -> Result<Arc<Lease>, StoreError> {
        let (id, capacity) = (record.id, record.capacity);
        if capacity == Bytes::ZERO || !capacity.0.is_multiple_of(PAGE_SIZE as u64) {
            return Err(StoreError::Capacity { lease: id, capacity });
        }
        let mut leases = self.locked();
        if leases.contains_key(&id) {
            return Err(StoreError::Exists(id));
        }
        // The record last: the next open deletes pages without a record, so a crash here leaves
        // nothing behind.
        let pages =
            if record.shared { self.create_shared(&record) } else { self.create_own(&record) }?;
        let entry = Entry::Record(id);
        record.save(&self.dir.file(&entry)).inspect_err(|_| {
            // The caller gets the first error; the next open retries the deletion.
            let _ = self.dir.delete(&pages_of(&record)).and_then(|()| self.leave(&record));
        })?;
        let lease = Arc::new(Lease::new(record, pages, 0, Arc::clone(&self.dir)));
        leases.insert(id, Arc::clone(&lease));
        Ok(lease)
    }

    fn create_own(&self, record: &LeaseRecord) -> Result<Pages, StoreError> {
        let entry = pages_of(record);
        let map = || {
            let file = self.dir.create(&entry, record.capacity.0)?;
            let private = PrivatePages::map(file, record.capacity.pages() as usize);
            private.map_err(StoreError::file("map", &self.dir.file(&entry)))
        };
        let private = map().inspect_err(|_| {
            let _ = self.dir.delete(&entry);
        })?;
        self.ram.note(private.lock_in_ram());
        Ok(Pages::Private(Arc::new(private)))
    }

    fn create_shared(&self, record: &LeaseRecord) -> Result<Pages, StoreError> {
        let entry = pages_of(record);
        let frames = self.groups.join(&record.group)?;
        let map = || {
            let pages = record.capacity.pages() as usize;
            let file = self.dir.create(&entry, Table::file_length(pages))?;
            Table::map(file, pages).map_err(StoreError::file("map", &self.dir.file(&entry)))
        };
        let table = map().inspect_err(|_| {
            let _ = self.dir.delete(&entry).and_then(|()| self.leave(record));
        })?;
        self.ram.note(table.lock_in_ram());
        Ok(Pages::Shared(SharedPages::new(table, frames)))
    }

    /// Ends the use of the group's frames by a lease that is gone.
    fn leave(&self, record: &LeaseRecord) -> Result<(), StoreError> {
        if record.shared { self.groups.leave(&record.group) } else { Ok(()) }
    }

    /// Returns the lease with this id.
    pub fn get(&self, id: LeaseId) -> Option<Arc<Lease>> {
        self.locked().get(&id).cloned()
    }

    /// Returns all leases, by id.
    pub fn leases(&self) -> Vec<Arc<Lease>> {
        self.locked().values().cloned().collect()
    }

    /// Ends a lease, frees its RAM except frames that other leases share, and returns how much it
    /// stored. Requests of callers that still hold the lease fail from then on.
    ///
    /// # Errors
    /// [`StoreError::Unknown`]; [`StoreError::Export`] if the kernel cannot free its pages;
    /// [`StoreError::File`] if its files cannot be deleted. The lease then stays in the store, for
    /// a retry.
    pub fn remove(&self, id: LeaseId) -> Result<Bytes, StoreError> {
        let lease = self.locked().remove(&id).ok_or(StoreError::Unknown(id))?;
        let stored = lease.stored();
        let removed = lease.retire().and_then(|()| self.leave(&lease.record()));
        if removed.is_err() {
            self.locked().insert(id, lease);
        }
        removed.map(|()| stored)
    }

    /// Returns how much is stored, promised and shared: in total, by group and by lease.
    pub fn usage(&self) -> Usage {
        let shared = self.groups.usage();
        Usage::of(self.locked().values().map(|lease| &**lease), shared.into_iter())
    }

    /// Compares the counters of shared pages with the tables. For tests: it reads all tables, and
    /// no thread may write meanwhile.
    ///
    /// # Errors
    /// The first counter that is wrong.
    pub fn audit(&self) -> Result<(), String> {
        self.groups.audit(&self.leases())
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Arc<Lease>>> {
        // Each change of the map is a single insertion or removal, so a panic in another thread
        // cannot leave it half done.
        lock(&self.leases)
    }
}

/// Returns the file that holds the lease's pages or its page table.
fn pages_of(record: &LeaseRecord) -> Entry {
    if record.shared {
        Entry::Table(record.id, record.group.clone())
    } else {
        Entry::Pages(record.id)
    }
}
