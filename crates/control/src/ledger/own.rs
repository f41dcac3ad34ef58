//! The memory that a host promises by itself: to VMs, regions, groups and exports made by hand.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group, RegionName, VolumeId};

use super::sum;
use crate::Lent;

/// The memory of a VM in RAM of this host. The memory of a VM in a region is a [`RegionMemory`]
/// instead: only the reserve counts here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmMemory {
    /// The VM.
    pub name: RegionName,
    /// The least size that its limits allow.
    pub floor: Bytes,
    /// The present size of its memory, used or not.
    pub size: Bytes,
    /// RAM of this host beyond `size` that only this VM gets, if it runs out of memory.
    pub reserve: Bytes,
    /// The RAM that its memory takes now.
    pub resident: Bytes,
}

impl VmMemory {
    /// Returns the reserve of a VM whose memory is a region.
    pub fn reserve_of(name: RegionName, reserve: Bytes) -> Self {
        let none = Bytes::ZERO;
        Self { name, floor: none, size: none, reserve, resident: none }
    }
}

/// The local cache of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionMemory {
    /// The region.
    pub name: RegionName,
    /// Its tenant.
    pub group: Group,
    /// The region's size.
    pub size: Bytes,
    /// The present size of the VM whose memory it is, if the VM takes its memory from RAM of this
    /// host as it grows, because the agent sizes the cache. `None` for any other region.
    pub vm_size: Option<Bytes>,
    /// The most that its cache may take.
    pub cache: Bytes,
    /// The RAM that its cache takes now.
    pub resident: Bytes,
    /// The pages that it shares with regions of its group, in frames outside its cache.
    pub shared: Bytes,
    /// What the agent needs to choose the size of the cache; `None` if it must not.
    pub auto: Option<AutoCache>,
    /// What of it is in its spill file; `None` if it has none.
    pub spilled: Option<Spilled>,
}

/// The pages of a region that no lender has room for, in a file on the host's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spilled {
    /// The region's volume.
    pub volume: VolumeId,
    /// The extents in the file.
    pub bytes: Bytes,
    /// The part of them that finds no room in the region's leases.
    pub homeless: Bytes,
}

/// A local cache whose size the host's agent chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoCache {
    /// The region's volume.
    pub volume: VolumeId,
    /// The capacity of its leases.
    pub leased: Bytes,
    /// How many pages it has fetched from lenders since its engine started.
    pub fetched: u64,
}

impl RegionMemory {
    /// Returns the most that its programs can use now.
    pub(crate) fn in_use(&self) -> Bytes {
        self.vm_size.unwrap_or(self.size).min(self.size)
    }

    /// Returns how much it must have at lenders before its cache may have this size.
    ///
    /// Leases are thin: a region borrows for the pages that leave, not for all of itself. Only
    /// pages of extents that have a place can leave, and some of them are in use. So at most half
    /// of the leases fills up, and the rest of their extents stays in the cache.
    pub(crate) fn needs(&self, cache: Bytes) -> Bytes {
        self.times_outside(2, cache)
    }

    /// Returns how much it should have at lenders with a cache of this size: twice what it needs.
    /// The more extents have a place, the better the policy can choose. With Zipf's distribution
    /// over the pages, a larger lease saves hardly any fetches.
    pub(crate) fn wants(&self, cache: Bytes) -> Bytes {
        self.times_outside(4, cache)
    }

    fn times_outside(&self, times: u64, cache: Bytes) -> Bytes {
        if cache >= self.size {
            return Bytes::ZERO;
        }
        let whole = self.size.round_up_to_extents();
        let outside = whole.saturating_sub(cache);
        Bytes(outside.0.saturating_mul(times)).round_up_to_extents().min(whole)
    }

    /// Returns the smallest cache that it may have with this much at lenders.
    pub(crate) fn least_cache(&self, leased: Bytes) -> Bytes {
        match self.size.saturating_sub(leased) {
            Bytes::ZERO => Bytes::ZERO,
            // The last extent may be smaller than the others, and take a whole slot.
            _ => (self.size.round_up_to_extents() - leased.scaled(0.5)).min(self.size),
        }
    }

    /// Returns whether no limit that it shares with others bounds it: its pages have no other
    /// place.
    fn ignores_limits(&self) -> bool {
        self.auto.is_some_and(|auto| auto.leased < self.size)
    }

    /// Returns the most that its cache can take: shared pages need no room in it.
    fn floor(&self) -> Bytes {
        self.cache.min(self.in_use().saturating_sub(self.shared))
    }
}

/// A limit that the caches of several regions share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLimit {
    /// The group of the regions; `None` for all regions of the host.
    pub group: Option<Group>,
    /// The most that their caches may take together.
    pub bytes: Bytes,
}

/// The memory that the regions of a group share on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMemory {
    /// The group.
    pub group: Group,
    /// The RAM that its frames take: the pages stored once.
    pub frames: Bytes,
    /// Its cache of disks, if there is one.
    pub disk_cache: Option<DiskCache>,
}

/// A group's cache of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskCache {
    /// The most that it may take.
    pub size: Bytes,
    /// The RAM that it takes now.
    pub used: Bytes,
    /// Whether the operator set the size. If not, the size is a part of the group's savings.
    pub fixed: bool,
}

/// An export that an operator made by hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportMemory {
    /// The export: `export-` and the id of its process.
    pub name: RegionName,
    /// The most that its clients may store.
    pub capacity: Bytes,
    /// The RAM that it takes now.
    pub stored: Bytes,
}

/// All memory that a host promises besides the leases of its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnMemory {
    /// The VMs in RAM of this host.
    pub vms: Vec<VmMemory>,
    /// The regions, those of VMs in the pool among them.
    pub regions: Vec<RegionMemory>,
    /// The limits that caches of these regions share.
    pub cache_limits: Vec<CacheLimit>,
    /// The groups that share pages or cache disks here.
    pub groups: Vec<GroupMemory>,
    /// The exports made by hand.
    pub exports: Vec<ExportMemory>,
}

impl OwnMemory {
    /// Returns the VMs that take their memory from RAM of this host as they grow, each with its
    /// present size.
    pub fn growing(&self) -> impl Iterator<Item = (&RegionName, Bytes)> {
        let vms = self.vms.iter().map(|vm| (&vm.name, vm.size));
        vms.chain(self.regions.iter().filter_map(|region| Some((&region.name, region.vm_size?))))
    }

    /// Returns the same memory, in which a cache that the agent sizes counts with the RAM that it
    /// takes now, and not with its limit.
    pub(crate) fn with_auto_caches_as_used(&self) -> Self {
        let mut own = self.clone();
        for region in own.regions.iter_mut().filter(|region| region.auto.is_some()) {
            region.cache = region.cache.min(region.resident);
        }
        own
    }

    pub(super) fn vm_floor(&self) -> Bytes {
        sum(self.vms.iter().map(|vm| vm.floor.saturating_add(vm.reserve)))
    }

    pub(super) fn vm_elastic(&self) -> Bytes {
        sum(self.vms.iter().map(|vm| vm.size.saturating_sub(vm.floor)))
    }

    pub(super) fn cache_floor(&self) -> Bytes {
        let mut caches: BTreeMap<&Group, Bytes> = BTreeMap::new();
        let (free, limited): (Vec<_>, Vec<_>) =
            self.regions.iter().partition(|region| region.ignores_limits());
        for region in limited {
            let all = caches.entry(&region.group).or_default();
            *all = all.saturating_add(region.floor());
        }
        let limit = |group: Option<&Group>| {
            let limits = self.cache_limits.iter().filter(|limit| limit.group.as_ref() == group);
            limits.map(|limit| limit.bytes).min().unwrap_or(Bytes(u64::MAX))
        };
        let groups = caches.into_iter().map(|(group, caches)| caches.min(limit(Some(group))));
        let limited = sum(groups).min(limit(None));
        let frames = self.groups.iter().map(|group| group.frames);
        sum(frames.chain([limited]).chain(free.into_iter().map(RegionMemory::floor)))
    }

    /// Returns what the groups save, and the disk caches beyond that. Shared pages may need RAM of
    /// their own again at any moment, so the savings remain promised to the group.
    pub(super) fn group_surplus(&self) -> Bytes {
        let mut shared: BTreeMap<&Group, Bytes> = BTreeMap::new();
        for region in &self.regions {
            let all = shared.entry(&region.group).or_default();
            *all = all.saturating_add(region.shared);
        }
        sum(self.groups.iter().map(|group| {
            let shared = shared.get(&group.group).copied().unwrap_or_default();
            let saved = shared.saturating_sub(group.frames);
            match group.disk_cache {
                Some(DiskCache { size, fixed: true, .. }) => saved.saturating_add(size),
                Some(DiskCache { size, .. }) => saved.max(size),
                None => saved,
            }
        }))
    }

    /// Returns the RAM that all but the exports take now. Use beyond a promise counts as use of
    /// programs.
    pub(super) fn resident(&self) -> Bytes {
        let vms = self.vms.iter().map(|vm| {
            let promised = vm.size.max(vm.floor).saturating_add(vm.reserve);
            vm.resident.min(promised)
        });
        let regions = self.regions.iter().map(|region| region.resident.min(region.floor()));
        let groups = self.groups.iter().map(|group| {
            let used = group.disk_cache.map_or(Bytes::ZERO, |disk| disk.used.min(disk.size));
            group.frames.saturating_add(used)
        });
        sum(vms.chain(regions).chain(groups))
    }

    /// Returns the sums over the exports.
    pub(super) fn exported(&self) -> Lent {
        let stored = self.exports.iter().map(|export| export.stored.min(export.capacity));
        Lent {
            granted: sum(self.exports.iter().map(|export| export.capacity)),
            stored: sum(stored),
            mirror: Bytes::ZERO,
        }
    }
}
