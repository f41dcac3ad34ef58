//! What outlives an agent: a host's RAM, its volumes, its VMs, its store, and work in progress.
//!
//! The ledger counts bytes, page by page. Each host books where the pages of its programs are, and
//! each lender books the bytes in each lease. The two books are separate; `invariants` compares
//! them.

mod copying;
mod moving;
mod settling;
mod store;
mod vm;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::Memory;
use aquifer_page::{Bytes, LeaseId, RegionName, VolumeId};

pub(crate) use copying::{Copied, Target};
use moving::Moving;
pub(crate) use moving::{Awaited, Gone, Leases, Leaving, Progress, Reason};
pub(crate) use settling::Flow;
pub(crate) use store::Stored;
pub(crate) use vm::{Standing, Vm};
pub(crate) use volume::{Place, Volume};

use crate::Load;
use crate::event::{HostNumber, JobId};
use crate::shell::Job;

/// The share of RAM that the kernel keeps free.
const KERNEL_RESERVE: f64 = 0.02;

/// A host without its agent.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) total: Bytes,
    pub(crate) load: Load,
    /// The memory of all programs, wherever it is.
    pub(crate) demand: Bytes,
    /// The part of it in RAM.
    pub(crate) resident: Bytes,
    /// The part of it in the swap area of the local disk.
    pub(crate) disk: Bytes,
    pub(crate) volumes: BTreeMap<VolumeId, Volume>,
    pub(crate) store: BTreeMap<LeaseId, Stored>,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    pub(crate) vms: BTreeMap<RegionName, Vm>,
    pub(crate) moving: Moving,
    /// Whether the operator drains this host of its VMs.
    pub(crate) is_drained: bool,
    settled: Duration,
}

/// An entry for the book of a lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Posting {
    pub(crate) lender: HostNumber,
    pub(crate) lease: LeaseId,
    pub(crate) bytes: Bytes,
    /// Whether the bytes go into the lease or leave it.
    pub(crate) into: bool,
}

impl Machine {
    pub(crate) fn new(total: Bytes, load: Load) -> Self {
        Self {
            total,
            load,
            demand: Bytes::ZERO,
            resident: Bytes::ZERO,
            disk: Bytes::ZERO,
            volumes: BTreeMap::new(),
            store: BTreeMap::new(),
            jobs: BTreeMap::new(),
            vms: BTreeMap::new(),
            moving: Moving::default(),
            is_drained: false,
            settled: Duration::ZERO,
        }
    }

    /// Returns the bytes stored for other hosts.
    pub(crate) fn stored(&self) -> Bytes {
        self.store.values().map(|lease| lease.stored).sum()
    }

    pub(crate) fn stored_by_lease(&self) -> BTreeMap<LeaseId, Bytes> {
        self.store.iter().map(|(id, lease)| (*id, lease.stored)).collect()
    }

    /// Returns the bytes of programs on all volumes for swap.
    pub(crate) fn swapped(&self) -> Bytes {
        self.volumes.values().filter(|volume| volume.is_swap()).map(Volume::used).sum()
    }

    /// Returns the volumes of VMs that are here, and not on their way to another host.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        let here = self.vms.values().filter(|vm| !matches!(vm.standing, Standing::HandedOver(_)));
        here.filter_map(|vm| Some((vm.volume?, self.volumes.get(&vm.volume?)?)))
    }

    /// Returns the volumes that the agent of this host works with.
    pub(crate) fn volumes_here(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        let swap = self.volumes.iter().filter(|(_, volume)| volume.is_swap());
        swap.map(|(id, volume)| (*id, volume)).chain(self.regions())
    }

    /// Returns the leases whose pages have keys of their own: all that hold no second copies.
    pub(crate) fn leases_with_keys(&self) -> BTreeSet<LeaseId> {
        self.volumes_here().flat_map(|(_, volume)| volume.places.keys().copied()).collect()
    }

    /// Returns the bytes of programs that wait for a disk.
    pub(crate) fn on_disk(&self) -> Bytes {
        self.disk + self.volumes.values().map(|volume| volume.spilled).sum()
    }

    /// Returns the bytes of programs in the leases of other hosts.
    pub(crate) fn remote(&self) -> Bytes {
        self.volumes.values().map(Volume::placed).sum()
    }

    pub(crate) fn used(&self) -> Bytes {
        self.resident + self.held_by_vms() + self.stored()
    }

    /// Returns the RAM that is free for programs.
    pub(crate) fn free(&self) -> Bytes {
        let kept = self.total.scaled(KERNEL_RESERVE);
        self.total.saturating_sub(self.used()).saturating_sub(kept)
    }

    /// Returns the reading that the agent of this host gets.
    pub(crate) fn reading(&self) -> Memory {
        let (used, swap_used) = (self.used(), self.swapped());
        Memory { total: self.total, used, swap_used, pressure: false }
    }

    /// Returns the bytes by which programs and leases exceed the RAM.
    fn excess(&self) -> Bytes {
        let kept = self.total.scaled(KERNEL_RESERVE);
        self.used().saturating_add(kept).saturating_sub(self.total)
    }

    /// Books an entry of a borrower. If RAM runs short, pages of local programs go to the disk.
    /// Returns false if this host has no such lease, or fewer bytes in it.
    pub(crate) fn post(&mut self, posting: Posting) -> bool {
        let Some(lease) = self.store.get_mut(&posting.lease) else { return false };
        if posting.into {
            lease.stored += posting.bytes;
        } else if lease.stored >= posting.bytes {
            lease.stored = lease.stored - posting.bytes;
        } else {
            return false;
        }
        let out = self.excess().min(self.resident);
        self.resident = self.resident - out;
        self.disk += out;
        true
    }
}
