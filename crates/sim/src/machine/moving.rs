//! A move of a VM, at its source and at its destination. Both outlive the agents.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_page::{Bytes, LeaseId, RegionName, VolumeId};

use super::settling::take;
use super::{Flow, Machine, Place, Posting, Standing, Vm};
use crate::event::{HostNumber, MoveId};

/// The reason for a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The source was overloaded.
    Overload,
    /// The operator drains the source.
    Drain,
}

/// The leases under a VM's memory, each with its generation.
pub(crate) type Leases = BTreeMap<LeaseId, u32>;

/// The moves of VMs from and to a host.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    /// Those to other hosts.
    pub(crate) leaving: BTreeMap<MoveId, Leaving>,
    /// Those that this host awaits.
    pub(crate) awaited: BTreeMap<MoveId, Awaited>,
    /// The records of VMs that are on other hosts now.
    pub(crate) gone: BTreeMap<RegionName, Gone>,
}

/// The record of a VM that is on another host now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone {
    pub(crate) volume: Option<VolumeId>,
    pub(crate) to: HostNumber,
}

/// The move of a VM, at its source.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    pub(crate) vm: RegionName,
    pub(crate) to: HostNumber,
    /// The number of the agent that ordered it, among those of its host.
    pub(crate) ordered_by: u32,
    pub(crate) progress: Progress,
    /// The bytes left to copy.
    pub(crate) left: Bytes,
    pub(crate) sent: Bytes,
    /// Why it fails, if it does.
    pub(crate) fails: Option<String>,
    pub(crate) is_cancelled: bool,
    /// Since when it waits for another host.
    pub(crate) waits_since: Option<Duration>,
}

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The VM runs at the source.
    Copies,
    /// The VM belongs to the destination, which may not know it yet.
    HandedOver,
    /// The source has told its agent, and is about to remove the VM's record.
    Over,
}

/// The wait of a destination for a VM.
#[derive(Clone, Debug)]
pub(crate) struct Awaited {
    pub(crate) vm: RegionName,
    pub(crate) from: HostNumber,
    pub(crate) reason: Reason,
    pub(crate) size: Bytes,
    pub(crate) cache: Bytes,
    /// The volume under its memory and its leases, if that is borrowed.
    pub(crate) memory: Option<(VolumeId, Leases)>,
    pub(crate) since: Duration,
    /// Whether the source has reached this host.
    pub(crate) is_connected: bool,
}

impl Machine {
    /// Returns the volume under a VM's memory, with its leases.
    pub(crate) fn leases_of(&self, vm: &Vm) -> Option<(VolumeId, Leases)> {
        let id = vm.volume?;
        let places = self.volumes.get(&id)?.places.values();
        let lease = |place: &Place| (place.borrowed.lease, place.borrowed.generation);
        Some((id, places.map(lease).collect()))
    }

    /// Returns the leases of VMs that may come, by volume.
    pub(crate) fn expected(&self) -> BTreeMap<VolumeId, BTreeSet<LeaseId>> {
        let memory = self.moving.awaited.values().filter_map(|awaited| awaited.memory.as_ref());
        memory.map(|(volume, leases)| (*volume, leases.keys().copied().collect())).collect()
    }

    /// Returns whether a move of this volume is in progress.
    pub(crate) fn is_moving(&self, volume: VolumeId) -> bool {
        let mut vms = self.vms.values();
        let vm = vms.find(|vm| vm.volume == Some(volume));
        vm.is_some_and(|vm| vm.standing != Standing::Runs)
    }

    /// Lets a VM run that has waited for the leases of this volume. Returns false if none has.
    pub(crate) fn begin_to_run(&mut self, vm: &RegionName, volume: VolumeId) -> bool {
        let Some(vm) = self.vms.get_mut(vm).filter(|vm| vm.standing == Standing::Starts) else {
            return false;
        };
        (vm.standing, vm.volume) = (Standing::Runs, Some(volume));
        true
    }

    /// Returns whether a VM can leave with these leases: it runs, and holds no others.
    pub(crate) fn may_leave(&self, vm: &RegionName, memory: Option<&(VolumeId, Leases)>) -> bool {
        let Some(vm) = self.vms.get(vm) else { return false };
        let volume = vm.volume.and_then(|id| self.volumes.get(&id));
        let is_at_rest = volume.is_none_or(|it| it.places.values().all(|it| !it.is_leaving));
        vm.standing == Standing::Runs && is_at_rest && self.leases_of(vm).as_ref() == memory
    }

    /// Writes all pages of a VM to its lenders.
    ///
    /// # Errors
    /// If they do not take all.
    pub(crate) fn empty_cache(
        &mut self,
        vm: &RegionName,
        reached: &BTreeSet<LeaseId>,
    ) -> (Result<(), String>, Vec<Posting>) {
        let mut flow = Flow::new(reached, Bytes(u64::MAX));
        let Some(vm) = self.vms.get_mut(vm) else { return (Ok(()), Vec::new()) };
        let Some(volume) = vm.volume.and_then(|id| self.volumes.get_mut(&id)) else {
            vm.outside += take(&mut vm.resident, Bytes(u64::MAX));
            return (Ok(()), Vec::new());
        };
        vm.resident = vm.resident - flow.write(volume, vm.resident);
        volume.spilled = volume.spilled - flow.fill(volume, volume.spilled);
        let left = vm.resident + volume.spilled;
        let emptied = match left {
            Bytes::ZERO => Ok(()),
            left => Err(format!("its lenders have no room for {left} of its memory")),
        };
        (emptied, flow.postings())
    }
}
