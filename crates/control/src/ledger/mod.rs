//! One account of a host's memory: every byte of M_t is in exactly one class.
//!
//! A [`Ledger`] is made from one set of readings: M_t and M_u, the leases, and the [`OwnMemory`]
//! that this host promises to its own VMs, regions and groups. Promises count in full, whether
//! their holders use them yet or not, so nothing is promised twice. Host and programs count with
//! what they use.
//!
//! - `own`: the readings of VMs, regions, groups and exports.
//! - `class`: the classes. `claims`: what VMs, regions and exports are about to have.
//!
//! # Invariants
//! - The classes sum to M_t, plus [`Ledger::overcommitted`] if the promises exceed M_t.
//! - A ledger is overcommitted only if nothing is free. It shows every promise in full.
//! - Without VMs, regions, groups and exports, a ledger leaves free at least
//!   [`Memory::spare`](crate::Memory::spare). So it limits lending for their sake only.
//!
//! `tests/control/ledger.rs` tests them under random readings and random sequences of changes.

mod claims;
mod class;
mod own;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

pub use claims::{CLAIM_LIFE, Claim, Claims, Purpose, Shortage};
pub use class::Class;
pub use own::{
    AutoCache, CacheLimit, DiskCache, ExportMemory, GroupMemory, OwnMemory, RegionMemory, Spilled,
    VmMemory,
};

use crate::{Config, Lent, Memory, Shareable};

/// The classes of a host's memory at one reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// M_t.
    pub total: Bytes,
    /// See [`Class::Reserved`].
    pub reserved: Bytes,
    /// See [`Class::VmFloor`].
    pub vm_floor: Bytes,
    /// See [`Class::VmElastic`].
    pub vm_elastic: Bytes,
    /// See [`Class::CacheFloor`].
    pub cache_floor: Bytes,
    /// See [`Class::GroupSurplus`].
    pub group_surplus: Bytes,
    /// See [`Class::Lent`].
    pub lent: Bytes,
    /// See [`Class::Mirror`].
    #[serde(default)]
    pub mirror: Bytes,
    /// See [`Class::Free`].
    pub free: Bytes,
    /// The bytes by which the other classes exceed M_t.
    pub overcommitted: Bytes,
}

impl Ledger {
    /// Makes the ledger of one set of readings. `lent` has the sums over this host's leases.
    pub fn new(memory: &Memory, config: &Config, own: &OwnMemory, lent: Lent) -> Self {
        let (vm_floor, vm_elastic) = (own.vm_floor(), own.vm_elastic());
        let (cache_floor, group_surplus) = (own.cache_floor(), own.group_surplus());
        let local = sum([vm_floor, vm_elastic, cache_floor, group_surplus]);
        let held = sum([own.resident(), own.exported().stored, lent.stored]);
        let programs = memory.used.saturating_sub(held);
        // M_r is for all of this host's programs: its VMs and caches use it up first.
        let reserve = match config.shareable {
            Shareable::Preconfigured { reserved } => reserved.saturating_sub(local),
            Shareable::Dynamic => Bytes::ZERO,
        };
        let reserved = programs.max(reserve);
        let mirror = lent.mirror;
        let granted = lent.granted.saturating_sub(mirror);
        let lent = granted.saturating_add(own.exported().granted);
        let promised = sum([reserved, local, lent, mirror]);
        Self {
            total: memory.total,
            reserved,
            vm_floor,
            vm_elastic,
            cache_floor,
            group_surplus,
            lent,
            mirror,
            free: memory.total.saturating_sub(promised),
            overcommitted: promised.saturating_sub(memory.total),
        }
    }

    /// Returns the bytes that a new promise can have: those in no other class, and second copies,
    /// which go first.
    pub fn available(&self) -> Bytes {
        self.free.saturating_add(self.mirror).saturating_sub(self.overcommitted)
    }

    /// Returns the bytes by which M_t is exceeded without second copies.
    pub fn broken(&self) -> Bytes {
        self.overcommitted.saturating_sub(self.mirror)
    }

    /// Returns the bytes that this host promises to its own VMs, regions and groups.
    pub fn local(&self) -> Bytes {
        sum([self.vm_floor, self.vm_elastic, self.cache_floor, self.group_surplus])
    }

    /// Returns the bytes that this host promises to those and to borrowers.
    pub fn promised(&self) -> Bytes {
        self.local().saturating_add(self.lent)
    }

    /// Returns the bytes by which the promises to its own alone exceed M_t.
    pub fn promised_too_much(&self) -> Bytes {
        self.local().saturating_sub(self.total)
    }

    /// Returns the bytes in a class.
    pub fn of(&self, class: Class) -> Bytes {
        match class {
            Class::Reserved => self.reserved,
            Class::VmFloor => self.vm_floor,
            Class::VmElastic => self.vm_elastic,
            Class::CacheFloor => self.cache_floor,
            Class::GroupSurplus => self.group_surplus,
            Class::Lent => self.lent,
            Class::Mirror => self.mirror,
            Class::Free => self.free,
        }
    }

    /// Returns the bytes by which a class can grow without breaking a promise. Floors may grow at
    /// the cost of elastic memory, which VMs give up on request. All others grow from free memory
    /// and at the cost of second copies; these copies grow from free memory only.
    pub fn spare(&self, class: Class) -> Bytes {
        match class {
            Class::VmFloor | Class::CacheFloor => {
                let gives = sum([self.free, self.mirror, self.vm_elastic]);
                gives.saturating_sub(self.overcommitted)
            }
            Class::Reserved | Class::VmElastic | Class::GroupSurplus | Class::Lent => {
                self.available()
            }
            Class::Mirror => self.free,
            Class::Free => Bytes::ZERO,
        }
    }

    /// Returns whether a class can grow by `bytes` without breaking a promise.
    pub fn may_take(&self, class: Class, bytes: Bytes) -> bool {
        bytes <= self.spare(class)
    }
}

/// Returns the sum, or the largest size if the sum does not fit.
fn sum(all: impl IntoIterator<Item = Bytes>) -> Bytes {
    all.into_iter().fold(Bytes::ZERO, Bytes::saturating_add)
}
