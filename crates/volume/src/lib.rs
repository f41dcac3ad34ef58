//! A borrower's volumes: extents over leases of one or several lenders.
//!
//! A [`Volume`] is a linear address space. At its first write, an extent gets a place on the lease
//! with the most room. It can move to another lease while it is read and written
//! ([`Volume::evacuate`]). If no lender has room, it goes to a local spill file. Leases and the
//! spill file hold extents by a [`Holder`](holder::Holder). Pages may have a second copy, on
//! another lease or on this host's disk.

mod add_lease;
mod bitmap;
mod claim;
mod config;
mod disk_copies;
mod encryption;
mod error;
mod events;
mod extent;
mod fair_lock;
pub mod holder;
mod lease;
mod ledger;
mod mover;
mod placement;
mod reads;
mod restore;
mod second_copies;
mod spill;
mod status;
mod sys;
mod tags;
mod target;
mod upkeep;
mod volume;

use std::sync::{Mutex, MutexGuard};

use aquifer_page::WorkerId;
use aquifer_transport::sleep::lock;

pub use claim::Claim;
pub use config::VolumeConfig;
pub use disk_copies::DiskCopies;
pub use encryption::{Encryption, EncryptionKey, EncryptionMode, PageCipher};
pub use error::VolumeError;
pub use events::{Event, Happening};
pub use ledger::Ledger;
pub use mover::{Evacuated, Moved, Progress};
pub use second_copies::SecondCopy;
pub use spill::SpillFile;
pub use status::{
    CopyStatus, DiskCopyStatus, LeaseState, LeaseStatus, RingStatus, SpillStatus, Traffic,
    VolumeStatus,
};
pub use tags::TagMemory;
pub use target::{LeaseTarget, NvmeAccess, Protocol};
pub use upkeep::Upkeep;
pub use volume::Volume;

/// Locks the worker's own element of `all`, or else a free one. There may be more workers than
/// elements.
fn lock_any<T>(all: &[Mutex<T>], worker: WorkerId) -> MutexGuard<'_, T> {
    let own = worker.0 % all.len();
    let free = (0..all.len()).find_map(|at| all[(own + at) % all.len()].try_lock().ok());
    free.unwrap_or_else(|| lock(&all[own]))
}
