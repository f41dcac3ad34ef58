//! Memory that this host has agreed to give a VM, a region or an export that its readings do not
//! show yet.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use aquifer_page::{Bytes, Group, RegionName};

use super::{ExportMemory, Ledger, OwnMemory, RegionMemory, VmMemory};

/// How long a claim counts if what it is for never shows: the command that made it has died.
pub const CLAIM_LIFE: Duration = Duration::from_secs(60);

/// How long a claim counts at least. An older reading may show a former VM of the same name.
const LEAST_LIFE: Duration = Duration::from_secs(5);

/// What a claim is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// The memory of a VM that takes it from RAM of this host.
    Vm,
    /// The local cache of a region, also that of a VM in the pool.
    Cache,
    /// The pages of an export made by hand.
    Export,
}

/// The memory that a VM, a region or an export is about to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The VM, the region or the export.
    pub name: RegionName,
    /// What the memory is for.
    pub purpose: Purpose,
    /// The tenant of the region.
    pub group: Group,
    /// All of its memory, with what it has already.
    pub bytes: Bytes,
    /// RAM beyond that which only this VM gets, if it runs out of memory.
    pub reserve: Bytes,
}

/// The claims that count, at most one for each VM, region and export.
#[derive(Clone, Debug, Default)]
pub struct Claims(BTreeMap<(Purpose, RegionName), Noted>);

/// A claim that counts.
#[derive(Clone, Debug)]
pub struct Noted {
    claim: Claim,
    at: Duration,
    /// Whether a reading has shown as much.
    shown: bool,
}

impl Claims {
    /// Notes a claim, instead of a former one for the same thing.
    pub fn note(&mut self, claim: Claim, now: Duration) {
        let key = (claim.purpose, claim.name.clone());
        self.0.insert(key, Noted { claim, at: now, shown: false });
    }

    /// Takes out the claim for a thing: of a command that has failed, or that claims again.
    pub fn take(&mut self, purpose: Purpose, name: &RegionName) -> Option<Noted> {
        self.0.remove(&(purpose, name.clone()))
    }

    /// Puts back what was taken out.
    pub fn put_back(&mut self, noted: Noted) {
        self.0.insert((noted.claim.purpose, noted.claim.name.clone()), noted);
    }

    /// Forgets claims that a reading shows, and those that no reading has shown for their whole
    /// life.
    pub fn settle(&mut self, read: &OwnMemory, now: Duration) {
        self.0.retain(|_, noted| {
            noted.shown |= noted.claim.is_shown(read);
            let life = if noted.shown { LEAST_LIFE } else { CLAIM_LIFE };
            now.saturating_sub(noted.at) < life
        });
    }

    /// Returns whether a claim for this thing counts.
    pub fn has(&self, purpose: Purpose, name: &RegionName) -> bool {
        self.0.contains_key(&(purpose, name.clone()))
    }

    /// Returns whether no claim counts.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the memory that this host promises: what it has read, and what is claimed beyond.
    pub fn over(&self, read: &OwnMemory) -> OwnMemory {
        let mut own = read.clone();
        self.0.values().for_each(|noted| noted.claim.add_to(&mut own));
        own
    }
}

impl Claim {
    fn is_shown(&self, read: &OwnMemory) -> bool {
        match self.purpose {
            Purpose::Vm => {
                read.growing().any(|(name, size)| *name == self.name && size >= self.bytes)
            }
            Purpose::Cache => {
                let mut regions = read.regions.iter();
                let has = |region: &RegionMemory| region.cache.min(region.in_use());
                regions.any(|region| region.name == self.name && has(region) >= self.bytes)
            }
            Purpose::Export => {
                let mut exports = read.exports.iter();
                exports.any(|export| export.name == self.name && export.capacity >= self.bytes)
            }
        }
    }

    /// Notes the reserve of a VM whose memory is a region.
    fn keep_free(&self, own: &mut OwnMemory) {
        match own.vms.iter_mut().find(|vm| vm.name == self.name) {
            Some(vm) => vm.reserve = vm.reserve.max(self.reserve),
            None => own.vms.push(VmMemory::reserve_of(self.name.clone(), self.reserve)),
        }
    }

    /// Raises what the VM, the region or the export has to what it claims.
    pub fn add_to(&self, own: &mut OwnMemory) {
        let (name, bytes, none) = (self.name.clone(), self.bytes, Bytes::ZERO);
        if self.purpose == Purpose::Cache && self.reserve > none {
            self.keep_free(own);
        }
        let mut regions = own.regions.iter_mut();
        let of_vm = regions.find(|one| one.name == name && one.vm_size.is_some());
        if let (Purpose::Vm, Some(region)) = (self.purpose, of_vm) {
            region.vm_size = region.vm_size.max(Some(bytes));
            return;
        }
        match self.purpose {
            Purpose::Vm => match own.vms.iter_mut().find(|vm| vm.name == name) {
                Some(vm) => {
                    vm.size = vm.size.max(bytes);
                    vm.reserve = vm.reserve.max(self.reserve);
                }
                None => own.vms.push(VmMemory {
                    name,
                    floor: none,
                    size: bytes,
                    reserve: self.reserve,
                    resident: none,
                }),
            },
            Purpose::Cache => match own.regions.iter_mut().find(|region| region.name == name) {
                Some(region) => {
                    region.cache = region.cache.max(bytes);
                    // A cache of a fixed size counts in full, also beyond the VM's present size.
                    region.vm_size = region.vm_size.map(|size| size.max(bytes));
                }
                None => own.regions.push(RegionMemory {
                    name,
                    group: self.group.clone(),
                    size: bytes,
                    vm_size: None,
                    cache: bytes,
                    resident: none,
                    shared: none,
                    auto: None,
                    spilled: None,
                }),
            },
            Purpose::Export => match own.exports.iter_mut().find(|export| export.name == name) {
                Some(export) => export.capacity = export.capacity.max(bytes),
                None => own.exports.push(ExportMemory { name, capacity: bytes, stored: none }),
            },
        }
    }
}

/// Why a host has no room for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What the claim adds to the promises of this host.
    pub wanted: Bytes,
    /// The part of it for which there is room.
    pub room: Bytes,
    /// What is lent, by leases and by exports made by hand.
    pub lent: Bytes,
    /// The part of that which the agent can recall.
    pub recallable: Bytes,
    /// What VMs have above their floors, and could give up.
    pub elastic: Bytes,
}

impl Shortage {
    /// Compares the ledgers before and after a claim. There is room for a claim if it breaks no
    /// promise that was kept before.
    pub fn between(before: &Ledger, after: &Ledger, recallable: Bytes) -> Option<Self> {
        let lacks = after.broken().saturating_sub(before.broken());
        let wanted = after.promised().saturating_sub(before.promised());
        (lacks > Bytes::ZERO).then_some(Self {
            wanted,
            room: wanted.saturating_sub(lacks),
            lent: before.lent,
            recallable: recallable.min(before.lent),
            elastic: before.vm_elastic,
        })
    }

    /// Returns what the operator can do.
    pub fn help(&self) -> String {
        let mut ways = vec!["choose a smaller size or cache".to_owned()];
        if self.recallable > Bytes::ZERO {
            ways.push("take lent memory back with 'aquifer host drain'".to_owned());
        }
        if self.elastic > Bytes::ZERO {
            ways.push("shrink another VM with 'aquifer vm resize'".to_owned());
        }
        ways.push("or promise memory that this host lacks with --overcommit".to_owned());
        ways.join("; ")
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, room, lent, recallable, elastic } = self;
        write!(
            f,
            "it takes {wanted} of this host's RAM, and {room} are left for it ({lent} are lent, \
             {recallable} of them recallable; other VMs could give up {elastic})"
        )
    }
}
