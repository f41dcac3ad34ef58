use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};

use crate::dir::{Dir, Kind};
use crate::sys::Frames;
use crate::{Lease, LeaseRecord, StoreError, Usage};

/// All leases of a lender: a directory on a tmpfs, served by one process at a time.
///
/// Dropping the store leaves the leases and their pages where they are, for the next [`Store::open`].
#[derive(Debug)]
pub struct Store {
    dir: Arc<Dir>,
    leases: Mutex<BTreeMap<LeaseId, Arc<Lease>>>,
    findings: Vec<Finding>,
    swappable: AtomicBool,
}

/// Something odd that [`Store::open`] came across, for the operator's eyes.
#[derive(Debug)]
pub enum Finding {
    /// Pages without a record belong to a lease that was never granted or was being removed; they are gone now.
    PagesWithoutRecord(LeaseId),
    /// A record without pages: somebody else deleted the file. The lease and what it stored are lost.
    RecordWithoutPages(Box<LeaseRecord>),
    /// A lease that cannot be served. Its files stay where they are.
    Unusable(LeaseId, StoreError),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PagesWithoutRecord(id) => write!(f, "deleted the pages of lease {id}, which has no record"),
            Self::RecordWithoutPages(record) => {
                write!(f, "lease {} of {} is lost: somebody deleted its pages", record.id, record.borrower)
            }
            Self::Unusable(id, error) => write!(f, "lease {id} is left alone: {error}"),
        }
    }
}

impl Store {
    /// Opens the store in `dir`, making it if need be, and recovers its leases with all their pages.
    ///
    /// # Errors
    /// [`StoreError::NotTmpfs`], [`StoreError::Busy`], [`StoreError::File`]. A single lease that cannot be recovered is
    /// no error but a [finding](Self::findings).
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let dir = Arc::new(Dir::lock(dir)?);
        let mut store =
            Self { dir, leases: Mutex::default(), findings: Vec::new(), swappable: AtomicBool::new(false) };
        store.recover()?;
        for finding in &store.findings {
            tracing::warn!(dir = %store.dir.path().display(), "{finding}");
        }
        Ok(store)
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
        self.swappable.load(Ordering::Relaxed)
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
        let lease = self.create_pages(&record).inspect_err(|_| {
            // The first error is the one to tell; the next open tries this again.
            let _ = self.dir.delete(id, Kind::Pages);
        })?;
        leases.insert(id, Arc::clone(&lease));
        Ok(lease)
    }

    fn create_pages(&self, record: &LeaseRecord) -> Result<Arc<Lease>, StoreError> {
        let path = self.dir.file(record.id, Kind::Pages);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(StoreError::file("create", &path))?;
        file.set_len(record.capacity.0).map_err(StoreError::file("size", &path))?;
        let frames =
            Frames::map(file, record.capacity.pages() as usize).map_err(StoreError::file("map", &path))?;
        self.lock_in_ram(&frames);
        record.save(&self.dir.file(record.id, Kind::Record))?;
        Ok(Arc::new(Lease::new(record.clone(), frames, 0, Arc::clone(&self.dir))))
    }

    /// The lease with this id.
    pub fn get(&self, id: LeaseId) -> Option<Arc<Lease>> {
        self.locked().get(&id).cloned()
    }

    /// All leases, by id.
    pub fn leases(&self) -> Vec<Arc<Lease>> {
        self.locked().values().cloned().collect()
    }

    /// Ends a lease and gives its RAM back before returning; says how much that was. Who still has the lease gets
    /// [`StoreError::Gone`] from now on.
    ///
    /// # Errors
    /// [`StoreError::Unknown`]; [`StoreError::File`] if its files cannot be deleted.
    pub fn remove(&self, id: LeaseId) -> Result<Bytes, StoreError> {
        let lease = self.locked().remove(&id).ok_or(StoreError::Unknown(id))?;
        let stored = lease.stored();
        lease.retire()?;
        Ok(stored)
    }

    /// What is stored and promised, in all, by group and by lease.
    pub fn usage(&self) -> Usage {
        Usage::of(self.locked().values().map(|lease| &**lease))
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        let files = self.dir.list()?;
        let has = |id, kind| files.contains(&(id, kind));
        for &(id, kind) in &files {
            match kind {
                Kind::Draft => self.dir.delete(id, Kind::Draft)?,
                Kind::Pages if !has(id, Kind::Record) => {
                    self.dir.delete(id, Kind::Pages)?;
                    self.findings.push(Finding::PagesWithoutRecord(id));
                }
                Kind::Pages => {}
                Kind::Record => match self.recover_lease(id, has(id, Kind::Pages)) {
                    Ok(found) => self.findings.extend(found),
                    Err(error) => self.findings.push(Finding::Unusable(id, error)),
                },
            }
        }
        Ok(())
    }

    fn recover_lease(&self, id: LeaseId, has_pages: bool) -> Result<Option<Finding>, StoreError> {
        let record = LeaseRecord::load(&self.dir.file(id, Kind::Record))?;
        if !has_pages {
            self.dir.delete(id, Kind::Record)?;
            return Ok(Some(Finding::RecordWithoutPages(Box::new(record))));
        }
        let path = self.dir.file(id, Kind::Pages);
        let file =
            OpenOptions::new().read(true).write(true).open(&path).map_err(StoreError::file("open", &path))?;
        let length = file.metadata().map_err(StoreError::file("examine", &path))?.len();
        if record.id != id || record.capacity.0 != length || length == 0 {
            let why = format!(
                "the record is of lease {} with {}, the file has {length} bytes",
                record.id, record.capacity
            );
            return Err(StoreError::file("use", &path)(std::io::Error::other(why)));
        }
        let mut frames =
            Frames::map(file, record.capacity.pages() as usize).map_err(StoreError::file("map", &path))?;
        self.lock_in_ram(&frames);
        let stored = frames.adopt_stored().map_err(StoreError::file("recover", &path))?;
        let lease = Lease::new(record, frames, stored, Arc::clone(&self.dir));
        self.locked().insert(id, Arc::new(lease));
        Ok(None)
    }

    /// Locks what `frames` will store in RAM; where that is not allowed, says so once.
    fn lock_in_ram(&self, frames: &Frames) {
        if let Err(error) = frames.lock_in_ram()
            && !self.swappable.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                dir = %self.dir.path().display(),
                "stored pages may be swapped out, as they cannot be locked in RAM ({error}); \
                 raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity) or run as root"
            );
        }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Arc<Lease>>> {
        // The map is changed by single insertions and removals, so a panic elsewhere cannot have left it half done.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
