//! A borrower's volumes: extents over leases of one or several lenders.
//!
//! A [`Volume`] is a linear address space. An extent of it gets a place at its first write, on the lease with the most room;
//! it can move to another while it is read and written ([`Volume::evacuate`]), and to a local spill file when no lender has
//! room. What holds extents is a [`Holder`](holder::Holder).

mod bitmap;
mod config;
mod error;
mod extent;
pub mod holder;
mod joining;
mod lease;
mod ledger;
mod mover;
mod placement;
mod restore;
mod seal;
mod status;
mod target;
mod volume;

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use aquifer_fabric::sleep::going_to_sleep;

pub use config::VolumeConfig;
pub use error::PoolError;
pub use ledger::Ledger;
pub use mover::{Evacuated, Moved, Progress};
pub use seal::{Seal, SealKey, Sealer, Sealing};
pub use status::{LeaseState, LeaseStatus, SpillStatus, Traffic, VolumeStatus};
pub use target::{LeaseTarget, NvmeAccess, Protocol};
pub use volume::Volume;

/// Locks; a thread that panicked while it held the lock left nothing half done, as nothing here panics between changes
/// that belong together.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => return guard,
        Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => going_to_sleep(),
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
