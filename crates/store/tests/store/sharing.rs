//! Tests that equal pages of a group take RAM once, and reveal nothing to other groups.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use aquifer_page::export::{ExportError, Segment};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{Lease, LeaseRecord, SharedUsage, Store};

use crate::common::{
    Random, frames_taken, one_shared_lease, record, rollup, shared_record, shm_dir,
};

const PAGE: u64 = PAGE_SIZE as u64;
const MIB: usize = 1 << 20;
/// The most free frames that a group keeps for later writes.
const SPARE: Bytes = Bytes::mib(2);

fn pages(count: u64) -> Bytes {
    Bytes(count * PAGE)
}

/// Returns pages that differ from each other and from those of other seeds.
fn unique(count: usize, seed: u64) -> Vec<u8> {
    let mut data = vec![0; count * PAGE_SIZE];
    Random(seed).fill(&mut data);
    data
}

fn shared(store: &Store, group: &str) -> SharedUsage {
    store.audit().unwrap();
    store.usage().groups[&group.parse().unwrap()].shared
}

fn read(lease: &Lease, page: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count * PAGE_SIZE];
    lease.read(page * PAGE, &mut bytes).unwrap();
    bytes
}

fn leases(store: &Store, groups: &[&str]) -> Vec<Arc<Lease>> {
    groups.iter().map(|group| store.create(shared_record(group, Bytes::mib(64))).unwrap()).collect()
}

#[test]
fn equal_pages_of_a_group_take_ram_once() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let leases = leases(&store, &["red", "red", "red"]);
    let image = unique(1024, 1);
    for (number, lease) in leases.iter().enumerate() {
        // At another offset in each lease, and partly in pieces that are not aligned to pages.
        let at = number as u64 * 100 * PAGE;
        lease.write(at, &image[..MIB + 100]).unwrap();
        lease.write(at + MIB as u64 + 100, &image[MIB + 100..]).unwrap();
    }
    for (number, lease) in leases.iter().enumerate() {
        assert!(read(lease, number as u64 * 100, 1024) == image);
        assert_eq!(lease.stored(), pages(1024));
    }
    let figures = shared(&store, "red");
    assert_eq!(
        (figures.stored, figures.saved, figures.shared_frames),
        (pages(3072), pages(2048), 1024)
    );
    assert_eq!(figures.taken, frames_taken(dir.path(), "red"));
    assert!(figures.taken <= pages(1024) + SPARE, "{}", figures.taken);
    assert_eq!(store.usage().taken, figures.taken);
}

#[test]
fn equal_pages_of_two_groups_take_ram_twice() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let leases = leases(&store, &["red", "blue", "red"]);
    let image = unique(1024, 1);
    leases[0].write(0, &image).unwrap();
    let before = shared(&store, "red");
    leases[1].write(0, &image).unwrap();
    assert_eq!(shared(&store, "red"), before, "nothing of one group's shows in another's figures");
    assert_eq!(shared(&store, "blue").saved, Bytes::ZERO);
    leases[2].write(0, &image).unwrap();
    assert_eq!(shared(&store, "red").saved, pages(1024));
    assert_eq!(shared(&store, "blue").saved, Bytes::ZERO);
    assert!(store.usage().taken >= pages(2048));
    // Each group has the whole image once, in its own file.
    for group in ["red", "blue"] {
        let frames = fs::read(dir.path().join(format!("{group}.frames"))).unwrap();
        let mut kept: Vec<_> =
            frames.chunks(PAGE_SIZE).filter(|page| page.iter().any(|byte| *byte > 0)).collect();
        let mut wanted: Vec<_> = image.chunks(PAGE_SIZE).collect();
        kept.sort_unstable();
        wanted.sort_unstable();
        assert!(kept == wanted, "{group}");
    }
}

#[test]
fn private_leases_share_nothing_with_sharing_ones() {
    let (dir, store, lease) = one_shared_lease(Bytes::mib(1));
    let own = store.create(record(Bytes::mib(1), Bytes::mib(1))).unwrap();
    for lease in [&lease, &own] {
        lease.write(0, &[1; PAGE_SIZE]).unwrap();
    }
    let usage = store.usage();
    let group = usage.groups[own.group()];
    assert_eq!(
        (group.stored, group.shared.stored, group.shared.saved),
        (pages(2), pages(1), Bytes::ZERO)
    );
    assert_eq!(group.taken, frames_taken(dir.path(), "tenant") + pages(1));
    assert_eq!(usage.leases.iter().filter(|lease| lease.shared).count(), 1);
    let json = |lease: &Lease| {
        fs::read_to_string(dir.path().join(format!("{}.json", lease.id()))).unwrap()
    };
    assert!(json(&lease).contains("shared") && !json(&own).contains("shared"));
}

#[test]
fn a_write_to_a_shared_page_changes_no_other_lease() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let leases = leases(&store, &["red", "red"]);
    for lease in &leases {
        lease.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
    }
    let breaks = || shared(&store, "red").breaks;
    leases[0].write(0, &[2; PAGE_SIZE]).unwrap();
    assert_eq!(breaks(), 1);
    leases[0].write(PAGE + 10, &[3]).unwrap();
    assert_eq!(breaks(), 2);
    leases[0].write(PAGE + 10, &[1]).unwrap();
    assert_eq!(breaks(), 2, "it was nobody else's");
    leases[0].write(PAGE, &[1; PAGE_SIZE]).unwrap();
    leases[0].write(PAGE, &[0; PAGE_SIZE]).unwrap();
    leases[0].discard(2 * PAGE, PAGE).unwrap();
    assert_eq!(breaks(), 2, "the same again, and holes");
    leases[0].discard(3 * PAGE, 5).unwrap();
    assert_eq!(breaks(), 3);
    assert_eq!(read(&leases[1], 0, 4), [1; 4 * PAGE_SIZE]);
    let expected = [[2; PAGE_SIZE], [0; PAGE_SIZE], [0; PAGE_SIZE], [1; PAGE_SIZE]].concat();
    assert!(read(&leases[0], 0, 3) == expected[..3 * PAGE_SIZE]);
    assert!(read(&leases[0], 3, 1)[..6] == [0, 0, 0, 0, 0, 1]);
    let figures = shared(&store, "red");
    assert_eq!((figures.stored, figures.saved, figures.shared_frames), (pages(6), pages(3), 1));
}

#[test]
fn ram_is_freed_with_the_last_reference_to_a_page() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let leases = leases(&store, &["red", "red"]);
    let (image, other) = (unique(4096, 1), unique(4096, 2));
    leases.iter().for_each(|lease| lease.write(0, &image).unwrap());
    leases[0].write(4096 * PAGE, &other).unwrap();
    let taken = || {
        assert_eq!(shared(&store, "red").taken, frames_taken(dir.path(), "red"));
        frames_taken(dir.path(), "red")
    };
    assert!(taken() >= pages(8192));
    leases[0].discard(0, 4096 * PAGE).unwrap();
    assert!(taken() >= pages(8192), "the other one has it");
    leases[1].discard(0, 2048 * PAGE).unwrap();
    assert!(taken() <= pages(6144) + SPARE, "{}", taken());
    leases[1].write(2048 * PAGE, &vec![0; 2048 * PAGE_SIZE]).unwrap();
    assert!(taken() <= pages(4096) + SPARE, "{}", taken());
    leases[0].write(4096 * PAGE, &[7; 4096 * PAGE_SIZE]).unwrap();
    assert!(taken() <= pages(1) + SPARE, "overwritten: {}", taken());
}

#[test]
fn a_removed_lease_gives_back_what_nobody_else_has() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let leases = leases(&store, &["red", "red", "blue"]);
    let image = unique(2048, 1);
    leases[0].write(0, &image).unwrap();
    leases[1].write(0, &image[..1024 * PAGE_SIZE]).unwrap();
    assert_eq!(store.remove(leases[0].id()).unwrap(), pages(2048));
    assert_eq!(frames_taken(dir.path(), "red"), pages(1024), "and what was kept for later writes");
    assert!(read(&leases[1], 0, 1024) == image[..1024 * PAGE_SIZE]);
    shared(&store, "red");
    assert!(matches!(leases[0].write(0, &[1]), Err(ExportError::Gone(_))));

    let frames = File::open(dir.path().join("red.frames")).unwrap();
    store.remove(leases[1].id()).unwrap();
    assert!(!dir.path().join("red.frames").exists() && dir.path().join("blue.frames").exists());
    assert_eq!(frames.metadata().unwrap().blocks(), 0, "at once, though we have the lease");
    assert!(!store.usage().groups.contains_key(&"red".parse().unwrap()));

    // A new group of the same name starts empty.
    let again = store.create(shared_record("red", Bytes::mib(1))).unwrap();
    again.write(0, &[1; PAGE_SIZE]).unwrap();
    assert_eq!(shared(&store, "red").stored, pages(1));
    assert!(leases[1].read(0, &mut [0]).is_err());
}

#[test]
fn the_quota_counts_shared_pages_too() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let small = LeaseRecord { quota: pages(4), ..shared_record("red", Bytes::mib(1)) };
    let small = store.create(small).unwrap();
    let other = &leases(&store, &["red"])[0];
    other.write(0, &[1; 8 * PAGE_SIZE]).unwrap();
    small.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
    assert!(matches!(small.write(4 * PAGE, &[1; PAGE_SIZE]), Err(ExportError::Full { .. })));
    assert!(matches!(small.allocate_zeroes(4 * PAGE, PAGE), Err(ExportError::Full { .. })));
    assert!(read(&small, 4, 1) == [0; PAGE_SIZE]);
    small.write(0, &unique(4, 1)).unwrap();
    small.discard(0, PAGE).unwrap();
    small.allocate_zeroes(4 * PAGE, PAGE).unwrap();
    assert_eq!((small.stored(), small.quota()), (pages(4), pages(4)));
    store.audit().unwrap();
}

#[test]
fn held_pages_are_sent_from_frames_despite_other_writes() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let leases = leases(&store, &["red", "red"]);
    let image = unique(16, 1);
    leases.iter().for_each(|lease| lease.write(PAGE, &image).unwrap());
    let held = [leases[0].hold(0, 18 * PAGE).unwrap(), leases[1].hold(0, 18 * PAGE).unwrap()];
    let data = |held: &aquifer_store::Held<'_>| {
        let segments = held.segments().filter_map(|segment| match segment {
            Segment::Data(data) => Some(data.to_vec()),
            Segment::Hole(length) => {
                assert_eq!(length, PAGE_SIZE);
                None
            }
        });
        segments.collect::<Vec<_>>().concat()
    };
    assert!(data(&held[0]) == image && data(&held[1]) == image);
    let place = |held: &aquifer_store::Held<'_>| {
        let first = held.segments().find_map(|segment| match segment {
            Segment::Data(data) => Some(data.as_ptr()),
            Segment::Hole(_) => None,
        });
        first.unwrap()
    };
    assert_eq!(place(&held[0]), place(&held[1]), "one and the same");
    let [first, second] = held;
    drop(second);
    leases[1].write(PAGE, &unique(16, 2)).unwrap();
    leases[1].discard(0, 18 * PAGE).unwrap();
    assert!(data(&first) == image);
}

#[test]
fn frames_and_tables_are_locked_in_ram() {
    let (_dir, store, lease) = one_shared_lease(Bytes::mib(64));
    assert!(!store.is_swappable(), "this test needs root or an unlimited RLIMIT_MEMLOCK");
    lease.write(0, &unique(4096, 1)).unwrap();
    assert!(rollup("Locked") >= Bytes::mib(16), "{}", rollup("Locked"));
}
