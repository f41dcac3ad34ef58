//! Property tests of the ledger, under random readings and random sequences of changes.

use aquifer_control::ledger::{
    AutoCache, CacheLimit, Class, DiskCache, ExportMemory, GroupMemory, Ledger, OwnMemory,
    RegionMemory, VmMemory,
};
use aquifer_control::{Config, Lent, Memory, Shareable};
use aquifer_page::{Bytes, Group, VolumeId};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::cases;

const TOTAL: Bytes = Bytes::gib(16);

fn group() -> Group {
    Group::default()
}

fn sizes() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        Just(Bytes::ZERO),
        (0..6_u64 << 30).prop_map(Bytes),
        (0..64_u64).prop_map(Bytes::mib)
    ]
}

fn vms() -> impl Strategy<Value = VmMemory> {
    (sizes(), sizes(), sizes(), sizes()).prop_map(|(floor, size, reserve, resident)| VmMemory {
        name: "vm".parse().unwrap(),
        floor,
        size,
        reserve,
        resident,
    })
}

fn regions() -> impl Strategy<Value = RegionMemory> {
    let all = (sizes(), proptest::option::of(sizes()), sizes(), sizes(), sizes());
    all.prop_map(|(size, vm_size, cache, resident, shared)| RegionMemory {
        name: "region".parse().unwrap(),
        group: group(),
        size,
        vm_size,
        cache,
        resident,
        shared: shared.min(size),
        auto: None,
        spilled: None,
    })
}

fn groups() -> impl Strategy<Value = GroupMemory> {
    let disk = (sizes(), sizes(), any::<bool>()).prop_map(|(size, used, fixed)| DiskCache {
        size,
        used,
        fixed,
    });
    (sizes(), proptest::option::of(disk)).prop_map(|(frames, disk_cache)| GroupMemory {
        group: group(),
        frames,
        disk_cache,
    })
}

fn exports() -> impl Strategy<Value = ExportMemory> {
    (sizes(), sizes()).prop_map(|(capacity, stored)| ExportMemory {
        name: "export-1".parse().unwrap(),
        capacity,
        stored,
    })
}

fn owns() -> impl Strategy<Value = OwnMemory> {
    let limit = (sizes(), any::<bool>())
        .prop_map(|(bytes, all)| CacheLimit { group: (!all).then(group), bytes });
    let limits = vec(limit, 0..2);
    (vec(vms(), 0..4), vec(regions(), 0..4), limits, vec(groups(), 0..2), vec(exports(), 0..3))
        .prop_map(|(vms, regions, cache_limits, groups, exports)| OwnMemory {
            vms,
            regions,
            cache_limits,
            groups,
            exports,
        })
}

fn memories() -> impl Strategy<Value = Memory> {
    (sizes(), sizes(), sizes()).prop_map(|(total, used, swap_used)| Memory {
        total,
        used: used.min(total),
        swap_used,
        pressure: false,
    })
}

fn configs() -> impl Strategy<Value = Config> {
    let shareable = prop_oneof![
        Just(Shareable::Dynamic),
        sizes().prop_map(|reserved| Shareable::Preconfigured { reserved })
    ];
    shareable.prop_map(|shareable| Config { shareable, ..Config::default() })
}

fn lents() -> impl Strategy<Value = Lent> {
    (sizes(), sizes(), sizes()).prop_map(|(granted, stored, mirror)| Lent {
        granted,
        stored: stored.min(granted),
        mirror: mirror.min(granted),
    })
}

/// Checks that each byte is in exactly one class.
fn balances(ledger: &Ledger) {
    let all: Bytes = Class::ALL.into_iter().map(|class| ledger.of(class)).sum();
    assert_eq!(all, ledger.total + ledger.overcommitted, "{ledger:?}");
    assert!(ledger.free == Bytes::ZERO || ledger.overcommitted == Bytes::ZERO, "{ledger:?}");
}

proptest! {
    #![proptest_config(cases(512))]

    #[test]
    fn classes_sum_to_the_total(
        memory in memories(), config in configs(), own in owns(), lent in lents(),
    ) {
        let ledger = Ledger::new(&memory, &config, &own, lent);
        balances(&ledger);
        prop_assert_eq!(ledger.total, memory.total);
    }

    #[test]
    fn every_promise_counts_in_full(
        memory in memories(), config in configs(), own in owns(), lent in lents(),
    ) {
        let ledger = Ledger::new(&memory, &config, &own, lent);
        let floors: Bytes = own.vms.iter().map(|vm| vm.floor + vm.reserve).sum();
        prop_assert_eq!(ledger.vm_floor, floors);
        let whole: Bytes = own.vms.iter().map(|vm| vm.size.max(vm.floor) + vm.reserve).sum();
        prop_assert_eq!(ledger.vm_floor + ledger.vm_elastic, whole);
        let exported: Bytes = own.exports.iter().map(|export| export.capacity).sum();
        prop_assert_eq!(ledger.lent + ledger.mirror, lent.granted + exported);
        prop_assert_eq!(ledger.mirror, lent.mirror);
        if let Shareable::Preconfigured { reserved } = config.shareable {
            let local = ledger.vm_floor + ledger.vm_elastic + ledger.cache_floor;
            prop_assert!(ledger.reserved + local + ledger.group_surplus >= reserved);
        }
    }

    #[test]
    fn sharing_moves_a_regions_bytes_and_frees_none(size in 1_u64..1 << 20, part in 0.0..1.0) {
        let shared = Bytes(size).scaled(part);
        let frames = Bytes(shared.0 / 3);
        let name = "region".parse().unwrap();
        let region = RegionMemory {
            name, group: group(), size: Bytes(size), vm_size: None, cache: Bytes(size),
            resident: Bytes(size) - shared, shared, auto: None, spilled: None };
        let shares = GroupMemory { group: group(), frames, disk_cache: None };
        let own = OwnMemory { regions: vec![region], groups: vec![shares], ..OwnMemory::default() };
        let memory = Memory { total: TOTAL, ..Memory::default() };
        let ledger = Ledger::new(&memory, &Config::default(), &own, Lent::default());
        prop_assert_eq!(ledger.cache_floor + ledger.group_surplus, Bytes(size));
        prop_assert_eq!(ledger.group_surplus, shared - frames);
    }

    #[test]
    fn second_copies_take_nothing_from_others(
        memory in memories(), config in configs(), own in owns(), lent in lents(),
    ) {
        let stored = lent.stored.min(lent.granted - lent.mirror);
        let with = Ledger::new(&memory, &config, &own, Lent { stored, ..lent });
        let granted = lent.granted - lent.mirror;
        let without = Lent { granted, stored, mirror: Bytes::ZERO };
        let without = Ledger::new(&memory, &config, &own, without);
        for class in [Class::Reserved, Class::VmElastic, Class::GroupSurplus, Class::Lent] {
            prop_assert_eq!(with.spare(class), without.spare(class));
        }
        prop_assert_eq!(with.spare(Class::VmFloor), without.spare(Class::VmFloor));
        prop_assert_eq!(with.broken(), without.overcommitted);
    }

    #[test]
    fn without_promises_of_its_own_it_limits_nothing(
        memory in memories(), config in configs(), lent in lents(),
    ) {
        let stored = lent.stored.min(memory.used);
        let lent = Lent { stored, mirror: Bytes::ZERO, ..lent };
        let ledger = Ledger::new(&memory, &config, &OwnMemory::default(), lent);
        prop_assert!(ledger.spare(Class::Lent) >= memory.spare(&config, lent), "{:?}", ledger);
    }
}

/// A change of a host's promises or of its use.
#[derive(Clone, Debug)]
enum Change {
    Grant(Bytes),
    Recall(usize),
    Store(usize, f64),
    StartVm(VmMemory),
    GrowVm(usize, Bytes),
    TouchVm(usize, f64),
    VmVanishes(usize),
    CreateRegion(RegionMemory),
    GrowCache(usize, Bytes),
    RegionVanishes(usize),
    Programs(Bytes),
}

fn changes() -> impl Strategy<Value = Change> {
    let index = || 0..4_usize;
    prop_oneof![
        sizes().prop_map(Change::Grant),
        index().prop_map(Change::Recall),
        (index(), 0.0..1.0).prop_map(|(lease, part)| Change::Store(lease, part)),
        vms().prop_map(Change::StartVm),
        (index(), sizes()).prop_map(|(vm, by)| Change::GrowVm(vm, by)),
        (index(), 0.0..1.0).prop_map(|(vm, part)| Change::TouchVm(vm, part)),
        index().prop_map(Change::VmVanishes),
        regions().prop_map(|region| Change::CreateRegion(RegionMemory {
            vm_size: None,
            shared: Bytes::ZERO,
            ..region
        })),
        (index(), sizes()).prop_map(|(region, by)| Change::GrowCache(region, by)),
        index().prop_map(Change::RegionVanishes),
        sizes().prop_map(Change::Programs),
    ]
}

/// A host that asks its ledger before each promise.
#[derive(Default)]
struct Host {
    programs: Bytes,
    own: OwnMemory,
    /// Capacity and stored bytes of each lease.
    leases: Vec<(Bytes, Bytes)>,
}

impl Host {
    fn used(&self) -> Bytes {
        let vms = self.own.vms.iter().map(|vm| vm.resident);
        let regions = self.own.regions.iter().map(|region| region.resident);
        let stored = self.leases.iter().map(|(_, stored)| *stored);
        self.programs + vms.chain(regions).chain(stored).sum()
    }

    fn ledger(&self) -> Ledger {
        let memory = Memory { total: TOTAL, used: self.used(), ..Memory::default() };
        let lent = self.leases.iter().fold(Lent::default(), |sum, (granted, stored)| Lent {
            granted: sum.granted + *granted,
            stored: sum.stored + *stored,
            mirror: Bytes::ZERO,
        });
        Ledger::new(&memory, &Config::default(), &self.own, lent)
    }

    /// Makes a change if the ledger allows it. All memory in use lies within a promise.
    fn make(&mut self, change: Change) {
        let ledger = self.ledger();
        let own = &mut self.own;
        match change {
            Change::Grant(bytes) if ledger.may_take(Class::Lent, bytes) => {
                self.leases.push((bytes, Bytes::ZERO));
            }
            Change::Recall(lease) if lease < self.leases.len() => drop(self.leases.remove(lease)),
            Change::Store(lease, part) => {
                if let Some((granted, stored)) = self.leases.get_mut(lease) {
                    *stored = granted.scaled(part);
                }
            }
            Change::StartVm(vm) => {
                let promised = vm.size.max(vm.floor) + vm.reserve;
                if ledger.may_take(Class::VmElastic, promised) {
                    own.vms.push(VmMemory { resident: vm.resident.min(promised), ..vm });
                }
            }
            Change::GrowVm(vm, by) => match own.vms.get_mut(vm) {
                Some(vm) if ledger.may_take(Class::VmElastic, by) => vm.size += by,
                _ => {}
            },
            Change::TouchVm(vm, part) => {
                if let Some(vm) = own.vms.get_mut(vm) {
                    vm.resident = vm.size.scaled(part);
                }
            }
            Change::VmVanishes(vm) if vm < own.vms.len() => drop(own.vms.remove(vm)),
            Change::CreateRegion(region) => {
                let cache = region.cache.min(region.size);
                if ledger.may_take(Class::GroupSurplus, cache) {
                    let resident = region.resident.min(cache);
                    own.regions.push(RegionMemory { cache, resident, ..region });
                }
            }
            Change::GrowCache(region, by) => match own.regions.get_mut(region) {
                Some(region) if by <= ledger.available() => {
                    region.cache = (region.cache + by).min(region.size);
                }
                _ => {}
            },
            Change::RegionVanishes(region) if region < own.regions.len() => {
                drop(own.regions.remove(region));
            }
            Change::Programs(bytes) => {
                let more = bytes.saturating_sub(self.programs);
                if ledger.may_take(Class::Reserved, more) {
                    self.programs = bytes;
                }
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn a_host_that_asks_its_ledger_keeps_every_promise(changes in vec(changes(), 0..60)) {
        let mut host = Host::default();
        for change in changes {
            host.make(change.clone());
            let ledger = host.ledger();
            balances(&ledger);
            prop_assert_eq!(ledger.overcommitted, Bytes::ZERO, "after {:?}: {:?}", change, ledger);
            prop_assert_eq!(ledger.reserved, host.programs, "each use is in its own class");
            // Every promise may be claimed at once, and fits.
            let vms = host.own.vms.iter().map(|vm| vm.size.max(vm.floor) + vm.reserve);
            let caches = host.own.regions.iter().map(|region| region.cache.min(region.size));
            let leases = host.leases.iter().map(|(granted, _)| *granted);
            let claimed: Bytes = vms.chain(caches).chain(leases).sum();
            prop_assert!(host.programs + claimed <= TOTAL);
        }
    }
}

#[test]
fn promises_beyond_the_total_are_shown_in_full() {
    let vm = VmMemory {
        name: "vm".parse().unwrap(),
        floor: Bytes::gib(20),
        size: Bytes::gib(8),
        reserve: Bytes::ZERO,
        resident: Bytes::gib(1),
    };
    let own = OwnMemory { vms: vec![vm], ..OwnMemory::default() };
    let memory = Memory { total: TOTAL, used: Bytes::gib(3), ..Memory::default() };
    let ledger = Ledger::new(&memory, &Config::default(), &own, Lent::default());
    assert_eq!(ledger.vm_floor, Bytes::gib(20));
    assert_eq!((ledger.reserved, ledger.free), (Bytes::gib(2), Bytes::ZERO));
    assert_eq!(ledger.overcommitted, Bytes::gib(6));
    assert_eq!(ledger.spare(Class::VmFloor), Bytes::ZERO);
}

#[test]
fn floors_may_grow_at_the_cost_of_elastic_memory() {
    let vm = VmMemory {
        name: "vm".parse().unwrap(),
        floor: Bytes::gib(2),
        size: Bytes::gib(10),
        reserve: Bytes::gib(1),
        resident: Bytes::gib(10),
    };
    let own = OwnMemory { vms: vec![vm], ..OwnMemory::default() };
    let memory = Memory { total: TOTAL, used: Bytes::gib(11), ..Memory::default() };
    let ledger = Ledger::new(&memory, &Config::default(), &own, Lent::default());
    assert_eq!((ledger.vm_elastic, ledger.free), (Bytes::gib(8), Bytes::gib(4)));
    assert!(ledger.may_take(Class::VmFloor, Bytes::gib(12)));
    assert!(!ledger.may_take(Class::VmFloor, Bytes(Bytes::gib(12).0 + 1)));
    assert!(!ledger.may_take(Class::Lent, Bytes(Bytes::gib(4).0 + 1)));
    assert!(!ledger.may_take(Class::Free, Bytes(1)));
}

#[test]
fn a_vm_that_may_grow_counts_with_its_present_size() {
    let of = |vm_size: Option<u64>, cache| {
        let region = RegionMemory {
            name: "vm".parse().unwrap(),
            group: group(),
            size: Bytes::gib(8),
            vm_size: vm_size.map(Bytes::gib),
            cache: Bytes::gib(cache),
            resident: Bytes::gib(1),
            shared: Bytes::ZERO,
            auto: None,
            spilled: None,
        };
        let own = OwnMemory { regions: vec![region], ..OwnMemory::default() };
        let memory = Memory { total: Bytes::gib(16), ..Memory::default() };
        Ledger::new(&memory, &Config::default(), &own, Lent::default()).cache_floor
    };
    assert_eq!(of(Some(2), 8), Bytes::gib(2));
    assert_eq!(of(Some(4), 8), Bytes::gib(4), "it has grown");
    assert_eq!(of(Some(4), 3), Bytes::gib(3), "its cache is smaller");
    assert_eq!(of(None, 3), Bytes::gib(3), "the operator sizes the cache");
}

#[test]
fn caches_under_a_limit_count_once_with_the_limit() {
    let region = |name: &str, group: &str, gib| RegionMemory {
        name: name.parse().unwrap(),
        group: group.parse().unwrap(),
        size: Bytes::gib(8),
        vm_size: None,
        cache: Bytes::gib(gib),
        resident: Bytes::ZERO,
        shared: Bytes::ZERO,
        auto: None,
        spilled: None,
    };
    let limit = |group: Option<&str>, gib| CacheLimit {
        group: group.map(|group| group.parse().unwrap()),
        bytes: Bytes::gib(gib),
    };
    // The pages of this one have no other place.
    let whole = RegionMemory {
        auto: Some(AutoCache { volume: VolumeId(1), leased: Bytes::ZERO, fetched: 0 }),
        spilled: None,
        ..region("whole", "blue", 2)
    };
    let floor = |cache_limits| {
        let regions = [("a", "blue", 4), ("b", "blue", 4), ("c", "red", 3)];
        let regions = regions.map(|(name, group, gib)| region(name, group, gib));
        let regions = regions.into_iter().chain([whole.clone()]).collect();
        let own = OwnMemory { regions, cache_limits, ..OwnMemory::default() };
        let memory = Memory { total: TOTAL, ..Memory::default() };
        Ledger::new(&memory, &Config::default(), &own, Lent::default()).cache_floor
    };
    assert_eq!(floor(Vec::new()), Bytes::gib(2 + 11));
    assert_eq!(floor(vec![limit(Some("blue"), 5)]), Bytes::gib(2 + 8));
    assert_eq!(floor(vec![limit(Some("blue"), 5), limit(None, 6)]), Bytes::gib(2 + 6));
    assert_eq!(floor(vec![limit(None, 20)]), Bytes::gib(2 + 11));
}
