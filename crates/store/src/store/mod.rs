mod finding;
mod locking;
mod recover;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};

pub use self::finding::Finding;
use crate::dir::{Dir, Entry};
use crate::lease::Pages;
use crate::ram::RamLock;
use crate::sharing::{Groups, SharedPages};
use crate::sys::{OwnPages, Table};
use crate::{Lease, LeaseRecord, StoreError, Usage};

/// All leases of a lender: a directory on a tmpfs, served by one process at a time.
///
/// Dropping the store leaves the leases and their pages where they are, for the next [`Store::open`].
#[derive(Debug)]
pub struct Store {
    dir: Arc<Dir>,
    leases: Mutex<BTreeMap<LeaseId, Arc<Lease>>>,
    groups: Groups,
    findings: Vec<Finding>,
    ram: Arc<RamLock>,
}

impl Store {
    /// Opens the store in `dir`, making it if need be, and recovers its leases with all their pages. They can be served at
    /// once; a thread locks in RAM what they store.
    ///
    /// # Errors
    /// [`StoreError::NotTmpfs`], [`StoreError::Unguarded`], [`StoreError::Busy`], [`StoreError::File`]. A single lease that cannot be recovered is
    /// no error but a [finding](Self::findings).
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let (store, recovered) = Self::recovered(dir)?;
        locking::start(recovered, Arc::clone(&store.ram));
        Ok(store)
    }

    /// The store, and pages that are to be locked in RAM.
    fn recovered(dir: &Path) -> Result<(Self, Vec<Weak<OwnPages>>), StoreError> {
        let dir = Arc::new(Dir::lock(dir)?);
        let ram = Arc::new(RamLock::new(dir.path().to_owned()));
        let groups = Groups::new(Arc::clone(&dir), Arc::clone(&ram));
        let mut store = Self { dir, leases: Mutex::default(), groups, findings: Vec::new(), ram };
        store.recover()?;
        for finding in &store.findings {
            tracing::warn!(dir = %store.dir.path().display(), "{finding}");
        }
        let pages = |lease: &Arc<Lease>| match lease.pages() {
            Pages::Own(own) => Some(Arc::downgrade(own)),
            Pages::Shared(_) => None,
        };
        let recovered = store.leases().iter().filter_map(pages).collect();
        Ok((store, recovered))
    }

    /// What was odd when the store was opened.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The store's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Whether the kernel may swap stored pages out, because it does not let this process lock them in RAM.
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
        // The record last: pages without one are swept away by the next open, so a crash here leaves nothing behind.
        let pages =
            if record.shared { self.create_shared(&record) } else { self.create_own(&record) }?;
        let entry = Entry::Record(id);
        record.save(&self.dir.file(&entry)).inspect_err(|_| {
            // The first error is the one to tell; the next open tries this again.
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
            let own = OwnPages::map(file, record.capacity.pages() as usize);
            own.map_err(StoreError::file("map", &self.dir.file(&entry)))
        };
        let own = map().inspect_err(|_| {
            let _ = self.dir.delete(&entry);
        })?;
        self.ram.note(own.lock_in_ram());
        Ok(Pages::Own(Arc::new(own)))
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

    /// Has a lease that is gone no longer use the frames of its group.
    fn leave(&self, record: &LeaseRecord) -> Result<(), StoreError> {
        if record.shared { self.groups.leave(&record.group) } else { Ok(()) }
    }

    /// The lease with this id.
    pub fn get(&self, id: LeaseId) -> Option<Arc<Lease>> {
        self.locked().get(&id).cloned()
    }

    /// All leases, by id.
    pub fn leases(&self) -> Vec<Arc<Lease>> {
        self.locked().values().cloned().collect()
    }

    /// Ends a lease and gives its RAM back before returning, except for what others of its group share with it; says how
    /// much it stored. Who still has the lease gets [`StoreError::Gone`] from now on.
    ///
    /// # Errors
    /// [`StoreError::Unknown`]; [`StoreError::File`] if its files cannot be deleted: the lease is then still there to be
    /// removed once more.
    pub fn remove(&self, id: LeaseId) -> Result<Bytes, StoreError> {
        let lease = self.locked().remove(&id).ok_or(StoreError::Unknown(id))?;
        let stored = lease.stored();
        let removed = lease.retire().and_then(|()| self.leave(&lease.record()));
        if removed.is_err() {
            self.locked().insert(id, lease);
        }
        removed.map(|()| stored)
    }

    /// What is stored, promised and shared, in all, by group and by lease.
    pub fn usage(&self) -> Usage {
        let shared = self.groups.usage();
        Usage::of(self.locked().values().map(|lease| &**lease), shared.into_iter())
    }

    /// Whether all that is counted of shared pages is as their tables say: for tests, as it reads all tables, and as nobody
    /// may write meanwhile.
    ///
    /// # Errors
    /// What is not so.
    pub fn audit(&self) -> Result<(), String> {
        self.groups.audit(&self.leases())
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Arc<Lease>>> {
        // The map is changed by single insertions and removals, so a panic elsewhere cannot have left it half done.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The file that says where the pages of a lease are.
fn pages_of(record: &LeaseRecord) -> Entry {
    if record.shared {
        Entry::Table(record.id, record.group.clone())
    } else {
        Entry::Pages(record.id)
    }
}
