//! The places of the volume's extents, and the tags of its pages, in files that outlive the engine.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use aquifer_page::{ExtentIndex, LeaseId};
use aquifer_region_client::FileMap;
use aquifer_volume::{Ledger, TagMemory};
use rustix::fs::FallocateFlags;

use crate::effect;

/// Size of the entry of an extent, in bytes. Byte 0 says which of two notes counts (0: neither).
/// From byte 8 on follow the two notes: the slot (4 bytes, padded to 8) and the lease (16). A crash
/// during a write of one note leaves the other one valid.
const ENTRY: usize = 64;
const NOTE: usize = 24;

/// What the names of the files of tags begin with. The id of the lease follows.
const TAGS: &str = "tags-";

/// The ledger of a region's volume.
#[derive(Debug)]
pub(crate) struct ExtentMap {
    places: FileMap,
    /// Where the files of tags are, one for each lease.
    directory: PathBuf,
}

impl ExtentMap {
    /// Maps the file of places at `path`. The files of tags are beside it.
    pub(crate) fn new(path: &Path, file: &File, extents: u64) -> io::Result<Self> {
        let length = extents as usize * ENTRY;
        file.set_len(length as u64)?;
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        Ok(Self { places: FileMap::new(file, length)?, directory })
    }

    fn entry(&self, extent: ExtentIndex) -> &[AtomicU8] {
        &self.places.bytes()[extent.0 as usize * ENTRY..][..ENTRY]
    }

    fn tags_of(&self, lease: LeaseId) -> PathBuf {
        self.directory.join(format!("{TAGS}{lease}"))
    }

    /// Removes the tags of all leases but these. An earlier engine may have died before it did.
    pub(crate) fn keep_tags(&self, leases: impl Iterator<Item = LeaseId>) -> io::Result<()> {
        let kept: BTreeSet<_> = leases.map(|lease| format!("{TAGS}{lease}")).collect();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name().into_string().unwrap_or_default();
            if name.starts_with(TAGS) && !kept.contains(&name) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Returns the last noted place of each extent that has one.
    pub(crate) fn all(&self) -> impl Iterator<Item = (ExtentIndex, (LeaseId, u32))> {
        (0..(self.places.bytes().len() / ENTRY) as u64).map(ExtentIndex).filter_map(|extent| {
            let entry = self.entry(extent);
            let note = note(entry, entry[0].load(Ordering::Acquire))?;
            Some((
                extent,
                (LeaseId(u128::from_le_bytes(load(&note[8..]))), u32::from_le_bytes(load(note))),
            ))
        })
    }
}

/// Returns the note of this number, 1 or 2.
fn note(entry: &[AtomicU8], number: u8) -> Option<&[AtomicU8]> {
    (1..=2).contains(&number).then(|| &entry[8 + (usize::from(number) - 1) * NOTE..][..NOTE])
}

impl Ledger for ExtentMap {
    fn note(&self, extent: ExtentIndex, place: Option<(LeaseId, u32)>) {
        let entry = self.entry(extent);
        let next = if entry[0].load(Ordering::Relaxed) == 1 { 2 } else { 1 };
        let counts = place.zip(note(entry, next)).map_or(0, |((lease, slot), note)| {
            store(note, &slot.to_le_bytes());
            store(&note[8..], &lease.0.to_le_bytes());
            next
        });
        effect::at("place");
        entry[0].store(counts, Ordering::Release);
    }

    fn tags(&self, lease: LeaseId, pages: u64, may_be_new: bool) -> io::Result<TagMemory> {
        let mut options = OpenOptions::new();
        // New tags say that all pages are zeroes, which is false if the lease has extents.
        let may_be_new = may_be_new && self.all().all(|(_, (noted, _))| noted != lease);
        let options = options.read(true).write(true).create(may_be_new).truncate(false).mode(0o600);
        let path = self.tags_of(lease);
        let file = options.open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::new(
                error.kind(),
                format!("{} is gone, so nothing proves its pages", path.display()),
            ),
            _ => error,
        })?;
        let length = pages as usize * size_of::<u64>();
        // A page of a sparse file that finds no room later would end the process.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length as u64)?;
        Ok(Arc::new(FileMap::new(file, length)?))
    }

    fn forget_tags(&self, lease: LeaseId) {
        if let Err(error) = fs::remove_file(self.tags_of(lease))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {error}", self.tags_of(lease).display());
        }
    }
}

fn load<const N: usize>(from: &[AtomicU8]) -> [u8; N] {
    std::array::from_fn(|at| from[at].load(Ordering::Relaxed))
}

fn store(into: &[AtomicU8], bytes: &[u8]) {
    into.iter().zip(bytes).for_each(|(into, byte)| into.store(*byte, Ordering::Relaxed));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn tags_stay_for_the_next_engine_and_their_loss_is_an_error() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("extent_map");
        let open = || {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(&path);
            ExtentMap::new(&path, &file.unwrap(), 2).unwrap()
        };
        let map = open();
        let (one, other) = (LeaseId(1), LeaseId(2));
        let tags = map.tags(one, 1000, true).unwrap();
        (*tags).as_ref()[999].store(7, Ordering::Relaxed);
        map.tags(other, 1000, true).unwrap();
        map.note(ExtentIndex(1), Some((one, 0)));
        drop(map);
        let map = open();
        map.keep_tags([one].into_iter()).unwrap();
        assert!(!map.tags_of(other).exists());
        assert!(map.tags(other, 1000, false).is_err());
        assert_eq!((*map.tags(one, 1000, true).unwrap()).as_ref()[999].load(Ordering::Relaxed), 7);
        map.forget_tags(one);
        let error = map.tags(one, 1000, true).map(drop).unwrap_err().to_string();
        assert!(error.contains("nothing proves its pages"), "{error}");
        map.note(ExtentIndex(1), None);
        assert_eq!((*map.tags(one, 1000, true).unwrap()).as_ref()[999].load(Ordering::Relaxed), 0);
    }
}
