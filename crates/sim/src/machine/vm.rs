//! A VM on its host: its memory, as its guest uses it and as its host holds it.

use std::time::Duration;

use aquifer_control::ledger::{OwnMemory, RegionMemory, Spilled, VmMemory};
use aquifer_control::node::{Obstacle, VmReading};
use aquifer_page::{Bytes, Group, HostName, RegionName, VolumeId};

use super::settling::take;
use super::{Flow, Machine, Volume};
use crate::event::MoveId;
use crate::{Backing, VmSpec};

/// The progress of a VM from host to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It waits for the leases under its memory, and does not run.
    Starts,
    /// It runs here.
    Runs,
    /// It runs here, and this move copies its memory.
    Leaves(MoveId),
    /// It stands still: this move's destination takes it.
    HandedOver(MoveId),
}

/// A VM on its host.
#[derive(Clone, Debug)]
pub(crate) struct Vm {
    /// Its number among all VMs.
    pub(crate) number: usize,
    pub(crate) spec: VmSpec,
    /// The memory that its guest uses.
    pub(crate) wanted: Bytes,
    /// The part of it in RAM of this host.
    pub(crate) resident: Bytes,
    /// The part of it at lenders outside the cluster.
    pub(crate) outside: Bytes,
    /// The volume under its memory, if that is borrowed.
    pub(crate) volume: Option<VolumeId>,
    pub(crate) standing: Standing,
    pub(crate) history: History,
}

/// What a VM's record tells of its moves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct History {
    /// The time at which it arrived from another host, if it did.
    pub(crate) arrived: Option<Duration>,
    /// The last time at which it arrived because its former host was overloaded.
    pub(crate) relieved: Option<Duration>,
}

impl Vm {
    pub(crate) fn new(number: usize, spec: VmSpec) -> Self {
        let starts = spec.backing == Backing::Borrowed;
        Self {
            number,
            spec,
            wanted: Bytes::ZERO,
            resident: Bytes::ZERO,
            outside: Bytes::ZERO,
            volume: None,
            standing: if starts { Standing::Starts } else { Standing::Runs },
            history: History::default(),
        }
    }

    /// Returns whether its guest runs here.
    pub(crate) fn runs(&self) -> bool {
        matches!(self.standing, Standing::Runs | Standing::Leaves(_))
    }

    /// Returns the bytes that a move must copy out of the cache.
    pub(crate) fn dirty(&self) -> Bytes {
        self.resident.scaled(self.spec.dirty)
    }

    /// Returns what its record and the engine of its memory tell. `to` is the host that it is
    /// handed over to.
    fn reading(&self, to: Option<HostName>, now: Duration) -> VmReading {
        let obstacle = match self.standing {
            _ if self.spec.backing == Backing::Local => Some(Obstacle::LocalMemory),
            Standing::Starts => Some(Obstacle::Starts),
            Standing::HandedOver(_) => to.map(Obstacle::HandedOver),
            Standing::Runs | Standing::Leaves(_) => None,
        };
        let dirty = if obstacle.is_none() { self.dirty() } else { Bytes::ZERO };
        let arrived = self.history.arrived.map(|at| now.saturating_sub(at));
        VmReading { vm: self.spec.name.clone(), obstacle, dirty, arrived }
    }

    /// Follows the guest's demand. New pages are in the cache, and others leave it for them.
    fn settle(
        &mut self,
        now: Duration,
        touched: f64,
        volume: Option<&mut Volume>,
        flow: &mut Flow<'_>,
    ) {
        if !self.runs() {
            return;
        }
        let wanted = self.spec.load.demand(now).min(self.spec.size);
        if self.spec.backing == Backing::Local {
            (self.wanted, self.resident) = (wanted, wanted);
            return;
        }
        let mut elsewhere = Elsewhere { outside: &mut self.outside, volume };
        let gone = self.wanted.saturating_sub(wanted);
        let share = elsewhere.bytes().0 as f64 / self.wanted.0.max(1) as f64;
        let mut left = gone - elsewhere.read(gone.scaled(share).min(gone), flow);
        left = left - take(&mut self.resident, left);
        left = left - elsewhere.read(left, flow);
        self.wanted = self.wanted - (gone - left);
        let grown = wanted.saturating_sub(self.wanted);
        let read = elsewhere.read(elsewhere.bytes().scaled(touched).min(flow.budget()), flow);
        flow.spend(read);
        self.wanted += grown;
        self.resident += grown + read;
        let evicted = self.resident.saturating_sub(self.spec.cache);
        self.resident = self.resident - evicted;
        elsewhere.write(evicted, flow);
    }
}

/// The pages of a VM that are not in its cache.
#[derive(Debug)]
struct Elsewhere<'a> {
    outside: &'a mut Bytes,
    volume: Option<&'a mut Volume>,
}

impl Elsewhere<'_> {
    fn bytes(&self) -> Bytes {
        self.volume.as_ref().map_or(*self.outside, |volume| volume.used())
    }

    /// Takes up to `bytes` out of it. Returns the bytes taken.
    fn read(&mut self, bytes: Bytes, flow: &mut Flow<'_>) -> Bytes {
        match &mut self.volume {
            None => take(self.outside, bytes),
            Some(volume) => {
                let spilled = take(&mut volume.spilled, bytes);
                spilled + flow.take(volume, bytes - spilled)
            }
        }
    }

    /// Adds pages. Those for which no lease has room go to the spill file.
    fn write(&mut self, bytes: Bytes, flow: &mut Flow<'_>) {
        match &mut self.volume {
            None => *self.outside += bytes,
            Some(volume) => {
                let bytes = bytes + std::mem::take(&mut volume.spilled);
                volume.spilled = bytes - flow.write(volume, bytes);
            }
        }
    }
}

impl Machine {
    /// Returns the RAM that VMs take.
    pub(crate) fn held_by_vms(&self) -> Bytes {
        self.vms.values().map(|vm| vm.resident).sum()
    }

    /// Returns the memory that VMs use, wherever it is.
    pub(crate) fn wanted_by_vms(&self) -> Bytes {
        self.vms.values().map(|vm| vm.wanted).sum()
    }

    /// Returns the memory that this host promises to its VMs, and to those that it awaits.
    pub(crate) fn own(&self) -> OwnMemory {
        let mut own = OwnMemory::default();
        for Vm { spec, resident, volume, .. } in self.vms.values() {
            let (name, resident) = (&spec.name, *resident);
            let spilled = volume.and_then(|volume| {
                let bytes = self.volumes.get(&volume)?.spilled;
                // Pages go back as soon as there is room.
                Some(Spilled { volume, bytes, homeless: bytes })
            });
            match spec.backing {
                Backing::Local => own.vms.push(VmMemory {
                    name: name.clone(),
                    floor: spec.size,
                    size: spec.size,
                    reserve: Bytes::ZERO,
                    resident,
                }),
                Backing::Borrowed | Backing::Outside => {
                    let region = region(name, (spec.size, spec.cache), resident);
                    own.regions.push(RegionMemory { spilled, ..region });
                }
            }
        }
        let awaited = self.moving.awaited.values();
        own.regions.extend(awaited.map(|it| region(&it.vm, (it.size, it.cache), Bytes::ZERO)));
        own
    }

    /// Returns the bytes of [`own`](Self::own).
    pub(crate) fn promised_to_vms(&self) -> Bytes {
        let here: Bytes = self.vms.values().map(|vm| vm.spec.cache).sum();
        here + self.moving.awaited.values().map(|it| it.cache).sum::<Bytes>()
    }

    /// Returns the VMs as their records show them. `name` names a host.
    pub(crate) fn vm_readings(
        &self,
        now: Duration,
        name: impl Fn(usize) -> HostName,
    ) -> Vec<VmReading> {
        let to = |vm: &Vm| match vm.standing {
            Standing::HandedOver(id) => self.moving.leaving.get(&id).map(|it| name(it.to)),
            _ => None,
        };
        let here = self.vms.values().map(|vm| vm.reading(to(vm), now));
        let gone = self.moving.gone.iter().map(|(vm, gone)| VmReading {
            vm: vm.clone(),
            obstacle: Some(Obstacle::HandedOver(name(gone.to))),
            dirty: Bytes::ZERO,
            arrived: None,
        });
        let awaited = self.moving.awaited.values().map(|it| VmReading {
            vm: it.vm.clone(),
            obstacle: Some(Obstacle::Arrives(name(it.from))),
            dirty: Bytes::ZERO,
            arrived: None,
        });
        here.chain(gone).chain(awaited).collect()
    }

    pub(super) fn settle_vms(&mut self, now: Duration, touched: f64, flow: &mut Flow<'_>) {
        for vm in self.vms.values_mut() {
            let volume = vm.volume.and_then(|volume| self.volumes.get_mut(&volume));
            vm.settle(now, touched, volume, flow);
        }
    }
}

fn region(name: &RegionName, (size, cache): (Bytes, Bytes), resident: Bytes) -> RegionMemory {
    let (name, group, shared) = (name.clone(), Group::default(), Bytes::ZERO);
    RegionMemory {
        name,
        group,
        size,
        vm_size: None,
        cache,
        resident,
        shared,
        auto: None,
        spilled: None,
    }
}
