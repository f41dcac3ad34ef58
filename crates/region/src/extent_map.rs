//! The places of the volume's extents, in a file that outlives the engine.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use aquifer_page::{ExtentIndex, LeaseId};
use aquifer_region_client::FileMap;
use aquifer_volume::Ledger;

use crate::effect;

/// Size of the entry of an extent, in bytes. Byte 0 says which of two notes counts (0: neither).
/// From byte 8 on follow the two notes: the slot (4 bytes, padded to 8) and the lease (16). A crash
/// during a write of one note leaves the other one valid.
const ENTRY: usize = 64;
const NOTE: usize = 24;

/// The ledger of a region's volume.
#[derive(Debug)]
pub(crate) struct ExtentMap(FileMap);

impl ExtentMap {
    pub(crate) fn new(file: &File, extents: u64) -> io::Result<Self> {
        let length = extents as usize * ENTRY;
        file.set_len(length as u64)?;
        FileMap::new(file, length).map(Self)
    }

    fn entry(&self, extent: ExtentIndex) -> &[AtomicU8] {
        &self.0.bytes()[extent.0 as usize * ENTRY..][..ENTRY]
    }

    /// Returns the last noted place of each extent that has one.
    pub(crate) fn all(&self) -> impl Iterator<Item = (ExtentIndex, (LeaseId, u32))> {
        (0..(self.0.bytes().len() / ENTRY) as u64).map(ExtentIndex).filter_map(|extent| {
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
}

fn load<const N: usize>(from: &[AtomicU8]) -> [u8; N] {
    std::array::from_fn(|at| from[at].load(Ordering::Relaxed))
}

fn store(into: &[AtomicU8], bytes: &[u8]) {
    into.iter().zip(bytes).for_each(|(into, byte)| into.store(*byte, Ordering::Relaxed));
}
