//! The spill file of a volume: extents on a local disk, for which no lender has room.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGES_PER_EXTENT};
use serde::{Deserialize, Serialize};

use crate::encryption::{Encryption, PageCipher};
use crate::error::VolumeError;
use crate::holder::{BrokenHolder, Copy, FileHolder, VerifiedHolder};
use crate::lease::Lease;
use crate::tags::Tags;
use crate::volume::Volume;

/// A spill file that outlives its process, so that the next process can
/// [restore](Volume::restore) the extents in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpillFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The id that stands for the file in the volume's ledger.
    pub lease: LeaseId,
    /// The encryption of the pages in it.
    pub encryption: Encryption,
}

impl SpillFile {
    /// Names a spill file that does not exist yet, with a new key.
    pub fn new(path: PathBuf) -> Self {
        Self { path, lease: LeaseId::random(), encryption: Encryption::random() }
    }
}

impl Volume {
    /// Gives the volume a spill file that outlives this process. A volume keeps its first one. The
    /// caller made the file, empty and for root only.
    ///
    /// # Errors
    /// [`VolumeError::Spill`] if the file cannot be opened.
    pub fn add_spill(&self, spill: &SpillFile) -> Result<(), VolumeError> {
        if self.leases.spill().is_some() {
            return Ok(());
        }
        let file = FileHolder::open(&spill.path, self.spill_size(), self.all_workers())
            .map_err(|source| VolumeError::Spill { path: spill.path.clone(), source })?;
        let cipher = PageCipher::new(&spill.encryption, spill.lease);
        let tags = self.kept_tags(spill.lease, self.extents.len() as u64, true);
        let tags =
            tags.map_err(|source| VolumeError::Spill { path: spill.path.clone(), source })?;
        // An earlier process may have left anything in slots that no extent has.
        let mut lease =
            self.spill_lease(self.verified(None, Box::new(file), Some(cipher), tags), false);
        lease.noted_as = Some(spill.lease);
        self.leases.set_spill(lease);
        Ok(())
    }

    /// Gives the volume what is left of a spill file that cannot be opened: the extents in it keep
    /// their places there, and each access to them fails for this reason.
    pub fn add_broken_spill(&self, spill: &SpillFile, why: String) {
        // Tags that the earlier process left stay for the next one.
        let tags = Arc::new(Tags::new(self.extents.len() as u64 * PAGES_PER_EXTENT));
        let broken = Box::new(BrokenHolder(why));
        let holder = VerifiedHolder::new(broken, None, tags.clone(), 1);
        let broken = Copy::new(None, holder, tags);
        let mut lease = self.spill_lease(broken, false);
        lease.noted_as = Some(spill.lease);
        lease.set_open(false);
        self.leases.set_spill(lease);
    }

    /// Frees the room of slots in the spill file that hold no extent, but may hold leftovers.
    pub fn trim_spill(&self) {
        let Some(spill) = self.leases.spill() else { return };
        while spill.discard_leftover(self.mover_worker()) {}
    }

    /// Returns how much of the volume is in its spill file, in whole extents; `None` without one.
    pub fn spilled(&self) -> Option<Bytes> {
        self.leases.spill().map(|spill| Bytes(spill.taken() * EXTENT_SIZE))
    }

    /// Returns whether the spill file ends with this process.
    pub fn has_unnamed_spill(&self) -> bool {
        self.leases.spill().is_some_and(|spill| spill.noted_as.is_none())
    }

    /// Gives the volume a spill file in this directory, which ends with this process.
    pub(crate) fn add_unnamed_spill(&self, directory: &Path) -> Result<(), VolumeError> {
        let file = FileHolder::create(directory, self.spill_size(), self.all_workers())
            .map_err(|source| VolumeError::Spill { path: directory.to_owned(), source })?;
        // No other process needs the key.
        let cipher = PageCipher::new(&Encryption::random(), LeaseId::random());
        let tags = Tags::new(self.extents.len() as u64 * PAGES_PER_EXTENT);
        self.leases.set_spill(
            self.spill_lease(self.verified(None, Box::new(file), Some(cipher), tags), true),
        );
        Ok(())
    }

    fn spill_size(&self) -> Bytes {
        Bytes(self.extents.len() as u64 * EXTENT_SIZE)
    }

    fn spill_lease(&self, copy: Copy, is_clean: bool) -> Lease {
        Lease::new(copy, self.extents.len() as u32, |_| is_clean)
    }
}
