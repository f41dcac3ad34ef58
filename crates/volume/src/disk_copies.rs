//! Second copies of leases' pages in files on this host's disk.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGES_PER_EXTENT, WorkerId};
use serde::{Deserialize, Serialize};

use crate::encryption::{Encryption, PageCipher};
use crate::error::VolumeError;
use crate::events::Happening;
use crate::holder::{
    Copy, DiskFile, FileHolder, HolderError, Lag, LagWriter, LaggingHolder, Second, VerifiedHolder,
};
use crate::lease::Lease;
use crate::lock;
use crate::tags::Tags;
use crate::volume::Volume;

/// Where a volume keeps second copies of its leases' pages on this host's disk. The files outlive
/// the process, so that the next one can go on with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskCopies {
    /// How the paths of the files begin: each has the id of its lease after that.
    pub path: PathBuf,
    /// The encryption of pages that go to their lender unencrypted. All others are on the disk as
    /// the lender has them.
    pub encryption: Encryption,
    /// The size of the ring of pages on their way to the disk. It is in locked memory.
    pub ring: Bytes,
}

/// The disk copies of a volume in this process.
pub(crate) struct DiskKeeper {
    copies: DiskCopies,
    writer: LagWriter,
    /// The leases of which an earlier process may have left a copy. Held while a copy begins, or
    /// its file goes.
    changing: Mutex<BTreeSet<LeaseId>>,
    /// Whether the last copy could not be begun.
    has_failed: AtomicBool,
}

impl DiskCopies {
    /// The default size of the ring.
    pub const DEFAULT_RING: Bytes = Bytes::mib(64);

    /// Names files that do not exist yet, with a new key.
    pub fn new(path: PathBuf) -> Self {
        Self { path, encryption: Encryption::random(), ring: Self::DEFAULT_RING }
    }

    fn file(&self, lease: LeaseId) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("-{lease}"));
        path.into()
    }

    /// Returns the lease that stands for the copy of a lease's pages in a volume's ledger.
    pub fn tags_of(lease: LeaseId) -> LeaseId {
        LeaseId(lease.0 ^ 1 << 127)
    }

    /// Removes the copies of these leases. No process may use them.
    pub fn remove_files(&self, leases: impl IntoIterator<Item = LeaseId>) {
        // A file that is left over only takes room until the directory is cleared.
        leases.into_iter().for_each(|lease| _ = fs::remove_file(self.file(lease)));
    }
}

impl Volume {
    /// Keeps a second copy of the pages of each lease that has none, on this host's disk: also of
    /// leases that are added later, while the volume is under [`Upkeep`](crate::Upkeep). A volume
    /// keeps its first `copies`. With `resumes`, the files of an earlier process are used.
    ///
    /// # Errors
    /// [`VolumeError::DiskCopy`]: the memory of the ring cannot be locked, or a file cannot be
    /// made.
    pub fn keep_disk_copies(&self, copies: &DiskCopies, resumes: bool) -> Result<(), VolumeError> {
        if self.disk.get().is_some() {
            return Ok(());
        }
        let events = self.events.clone();
        let tell = move |why: Option<&HolderError>| {
            events.happened(match why {
                Some(why) => Happening::DiskCopiesPaused { why: reason(why) },
                None => Happening::DiskCopiesResumed,
            });
        };
        let writer = LagWriter::start(copies.ring, Lag::of_disk(Box::new(tell)))
            .map_err(|source| VolumeError::DiskCopy { path: copies.path.clone(), source })?;
        let leases = self.targets().into_iter().filter(|_| resumes).map(|target| target.lease);
        let (copies, changing) = (copies.clone(), Mutex::new(leases.collect()));
        let keeper = DiskKeeper { copies, writer, changing, has_failed: AtomicBool::new(false) };
        _ = self.disk.set(keeper);
        self.begin_all_disk_copies()
    }

    /// Returns whether the volume keeps copies on this host's disk.
    pub fn keeps_disk_copies(&self) -> bool {
        self.disk.get().is_some()
    }

    /// Begins the copies of leases that have none. Returns whether no lease lacks one.
    pub(crate) fn begin_disk_copies(&self) -> bool {
        let begun = self.begin_all_disk_copies();
        if let Some(keeper) = self.disk.get()
            && keeper.has_failed.swap(begun.is_err(), Ordering::Relaxed) != begun.is_err()
            && let Err(error) = &begun
        {
            self.events.happened(Happening::DiskCopiesPaused { why: error.to_string() });
        }
        begun.is_ok()
    }

    fn begin_all_disk_copies(&self) -> Result<(), VolumeError> {
        let Some(keeper) = self.disk.get() else { return Ok(()) };
        let leases: Vec<_> = self.leases.list().clone();
        let lacks = |lease: &&Arc<Lease>| lease.is_open() && lease.holder.second().is_none();
        leases.iter().filter(lacks).try_for_each(|lease| {
            self.begin_disk_copy(keeper, lease)
                .map_err(|(path, source)| VolumeError::DiskCopy { path, source })
        })
    }

    fn begin_disk_copy(
        &self,
        keeper: &DiskKeeper,
        lease: &Arc<Lease>,
    ) -> Result<(), (PathBuf, io::Error)> {
        let _adding = lock(&self.adding_lease);
        let mut earlier = lock(&keeper.changing);
        let Some(target) = &lease.target else { return Ok(()) };
        let is_here = self.leases.list().iter().any(|known| Arc::ptr_eq(known, lease));
        if !is_here || lease.holder.second().is_some() {
            return Ok(());
        }
        let (path, id) = (keeper.copies.file(target.lease), DiskCopies::tags_of(target.lease));
        let pages = lease.total * PAGES_PER_EXTENT;
        let fail = |error| (path.clone(), error);
        let mut tags = None;
        if earlier.contains(&target.lease) {
            // If this fails, the file stays as it is, for the next attempt.
            tags = self.earlier_tags(&path, id, pages).map_err(fail)?;
        }
        let tags = tags.map_or_else(|| self.fresh_tags(&path, id, pages), Ok);
        let tags = Arc::new(tags.map_err(fail)?);
        let workers = self.all_workers();
        let file = FileHolder::open(&path, Bytes(lease.total * EXTENT_SIZE), workers);
        let file = Box::new(file.map_err(fail)?);
        let lagging = keeper.writer.add(file, tags.clone(), (pages, WorkerId(0)));
        earlier.remove(&target.lease);
        let cipher = match &target.encryption {
            Some(encryption) => PageCipher::new(encryption, target.lease),
            None => PageCipher::new(&keeper.copies.encryption, id),
        };
        let holder = Box::new(lagging.clone());
        let holder = VerifiedHolder::new(holder, Some(cipher), tags.clone(), workers);
        let copy = Copy::new(None, holder, tags);
        let of_volume = (self.config.io_timeout, self.events.clone());
        self.begin_second(
            lease,
            Second {
                lagging: Some(lagging),
                file: Some(DiskFile { id, path }),
                ..Second::new(copy, target.encryption.is_some(), of_volume)
            },
        );
        Ok(())
    }

    /// Returns the tags of the pages that an earlier process left in the file, if there are both.
    fn earlier_tags(&self, path: &Path, id: LeaseId, pages: u64) -> io::Result<Option<Tags>> {
        let Some(ledger) = &self.config.ledger else { return Ok(None) };
        if !path.try_exists()? {
            return Ok(None);
        }
        match ledger.tags(id, pages, false) {
            // Nothing proves the pages in the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            tags => Ok(Some(Tags::lagging(tags?))),
        }
    }

    /// Makes an empty file of which no page is known, and its tags.
    fn fresh_tags(&self, path: &Path, id: LeaseId, pages: u64) -> io::Result<Tags> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.forget_tags(id);
        let tags = match &self.config.ledger {
            None => Tags::new(pages),
            Some(ledger) => Tags::lagging(ledger.tags(id, pages, true)?),
        };
        // Before the file exists: the next process must not take them for those of its pages.
        tags.forget_all();
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        made.map(|_| tags)
    }

    /// Keeps the files of disk copies as they are, while the result lives.
    pub(crate) fn hold_disk_copies(&self) -> Option<MutexGuard<'_, BTreeSet<LeaseId>>> {
        self.disk.get().map(|keeper| lock(&keeper.changing))
    }

    /// Removes the file of a copy that is on the disk. Nobody uses it afterwards. Returns false for
    /// any other copy.
    pub(crate) fn remove_disk_copy(&self, second: &Second) -> bool {
        let Some(file) = &second.file else { return false };
        second.lagging.iter().for_each(LaggingHolder::leave);
        if let Err(error) = fs::remove_file(&file.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            let why = format!("cannot remove {}: {error}", file.path.display());
            self.events.happened(Happening::DiskCopiesPaused { why });
        }
        self.forget_tags(file.id);
        true
    }
}

/// Returns why a disk took no pages.
pub(crate) fn reason(error: &HolderError) -> String {
    match error {
        HolderError::Full(why) | HolderError::Failed(why) => why.to_string(),
        other => other.to_string(),
    }
}
