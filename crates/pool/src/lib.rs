//! A borrower's volumes: extents over leases of one or several lenders.
//!
//! A [`Volume`] is a linear address space. An extent of it gets a place at its first write, on the lease with the most room;
//! it can move to another while it is read and written ([`Volume::evacuate`]), and to a local spill file when no lender has
//! room. What holds extents is a [`Holder`](holder::Holder).

mod bitmap;
mod claim;
mod config;
mod error;
mod events;
mod extent;
pub mod holder;
mod joining;
mod lease;
mod ledger;
mod mover;
mod nonzero;
mod placement;
mod restore;
mod seal;
mod status;
mod target;
mod upkeep;
mod volume;

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use aquifer_fabric::sleep::going_to_sleep;

pub use claim::Claim;
pub use config::VolumeConfig;
pub use error::PoolError;
pub use events::{Event, Happening};
pub use ledger::Ledger;
pub use mover::{Evacuated, Moved, Progress};
pub use seal::{Seal, SealKey, Sealer, Sealing};
pub use status::{LeaseState, LeaseStatus, SpillStatus, Traffic, VolumeStatus};
pub use target::{LeaseTarget, NvmeAccess, Protocol};
pub use upkeep::Upkeep;
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

/// Locks the one of `all` that is the worker's, or one that is free: there may be more workers than there are of these.
fn lock_any<T>(all: &[Mutex<T>], worker: usize) -> MutexGuard<'_, T> {
    let own = worker % all.len();
    let free = (0..all.len()).find_map(|at| all[(own + at) % all.len()].try_lock().ok());
    free.unwrap_or_else(|| lock(&all[own]))
}
