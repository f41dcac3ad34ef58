//! Tests that a new store finds all valid shared pages, and no others.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};
use aquifer_store::{Finding, Store};

use crate::common::{frames_taken, one_shared_lease, shared_record, shm_dir};

const PAGE: u64 = PAGE_SIZE as u64;
#[test]
fn a_store_finds_shared_pages_again_and_goes_on_sharing_them() {
    let (dir, store, lease) = one_shared_lease(Bytes::mib(16));
    lease.write(0, &[3; 8 * PAGE_SIZE]).unwrap();
    lease.write(1000 * PAGE + 7, b"hello").unwrap();
    lease.allocate_zeroes(2000 * PAGE, PAGE).unwrap();
    let (record, runs): (_, Vec<_>) =
        (lease.record(), lease.block_status(0, 16 << 20).unwrap().collect());
    drop((store, lease));

    let store = Store::open(dir.path()).unwrap();
    assert!(store.findings().is_empty());
    let lease = store.get(record.id).unwrap();
    assert!(lease.is_shared() && lease.record() == record);
    assert_eq!(lease.stored(), Bytes(10 * PAGE));
    assert_eq!(lease.block_status(0, 16 << 20).unwrap().collect::<Vec<_>>(), runs);
    assert_eq!(frames_taken(dir.path(), "tenant"), Bytes(3 * PAGE));
    let mut bytes = [0; 5];
    lease.read(1000 * PAGE + 7, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");

    let other = store.create(shared_record("tenant", Bytes::mib(1))).unwrap();
    other.write(0, &[3; PAGE_SIZE]).unwrap();
    assert_eq!(frames_taken(dir.path(), "tenant"), Bytes(3 * PAGE));
    store.audit().unwrap();
}

/// Creates a store of one group with a lease for each of these contents; returns the leases' ids.
fn leases_with(dir: &Path, contents: &[u8]) -> Vec<LeaseId> {
    let store = Store::open(dir).unwrap();
    let lease = |&content: &u8| {
        let lease = store.create(shared_record("tenant", Bytes::mib(1))).unwrap();
        lease.write(0, &[content; PAGE_SIZE]).unwrap();
        lease.write(PAGE, &[200; PAGE_SIZE]).unwrap();
        lease.id()
    };
    contents.iter().map(lease).collect()
}

fn table(dir: &Path, id: LeaseId) -> File {
    let path = dir.join(format!("{id}.tenant.table"));
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn an_entry_that_leads_nowhere_is_found_and_never_read() {
    let dir = shm_dir();
    let leases = leases_with(dir.path(), &[1, 2, 3]);
    for (lease, entry) in [(0, 5_000_000_u32), (1, 4000)] {
        table(dir.path(), leases[lease]).write_all_at(&entry.to_le_bytes(), 0).unwrap();
    }
    // Also on a second start, after enough writes that the second entry's frame exists.
    for time in 0..2 {
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.leases().len(), 1 + time);
        let lost = |id| {
            let is =
                |finding: &&Finding| matches!(finding, Finding::Unusable(lease, _) if *lease == id);
            store.findings().iter().find(is).unwrap().to_string()
        };
        assert!(
            lost(leases[0]).contains("page 0 is lost")
                && lost(leases[1]).contains("page 0 is lost")
        );
        store.audit().unwrap();
        let lease = store.get(leases[2]).unwrap();
        let mut bytes = [0; 2 * PAGE_SIZE];
        lease.read(0, &mut bytes).unwrap();
        assert!(bytes[..PAGE_SIZE] == [3; PAGE_SIZE] && bytes[PAGE_SIZE..] == [200; PAGE_SIZE]);
        if time == 0 {
            let more = store.create(shared_record("tenant", Bytes::mib(32))).unwrap();
            for page in 0..8000u64 {
                more.write(page * PAGE, &page.wrapping_add(1).to_le_bytes()).unwrap();
            }
        }
    }
}

#[test]
fn pages_of_an_unusable_lease_stay_until_it_is_usable() {
    let dir = shm_dir();
    let leases = leases_with(dir.path(), &[1, 2]);
    let record = dir.path().join(format!("{}.json", leases[0]));
    let text = fs::read_to_string(&record).unwrap();
    fs::write(&record, "{").unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert!(matches!(store.findings(), [Finding::Unusable(id, _)] if *id == leases[0]));
    store.audit().unwrap();
    store.remove(leases[1]).unwrap();
    let new = store.create(shared_record("tenant", Bytes::mib(1))).unwrap();
    (0..256).for_each(|page| new.write(page * PAGE, &[7, page as u8]).unwrap());
    store.audit().unwrap();
    drop((store, new));

    fs::write(&record, text).unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert!(store.findings().is_empty());
    let mut bytes = [0; 2 * PAGE_SIZE];
    store.get(leases[0]).unwrap().read(0, &mut bytes).unwrap();
    assert!(bytes[..PAGE_SIZE] == [1; PAGE_SIZE] && bytes[PAGE_SIZE..] == [200; PAGE_SIZE]);
    store.audit().unwrap();
}

#[test]
fn leftovers_of_sharing_are_swept_away() {
    let dir = shm_dir();
    let leases = leases_with(dir.path(), &[1, 2, 3, 4]);
    let path =
        |lease: usize, extension: &str| dir.path().join(format!("{}.{extension}", leases[lease]));
    // One removal in progress, one lost table, and one table of an impossible length.
    fs::remove_file(path(0, "json")).unwrap();
    fs::remove_file(path(1, "tenant.table")).unwrap();
    table(dir.path(), leases[2]).set_len(0).unwrap();
    fs::write(dir.path().join("gone.frames"), [1; PAGE_SIZE]).unwrap();

    let store = Store::open(dir.path()).unwrap();
    let findings = store.findings();
    assert_eq!(findings.len(), 4, "{findings:?}");
    let has = |matches: fn(&Finding) -> bool| findings.iter().any(matches);
    assert!(has(|finding| matches!(finding, Finding::PagesWithoutRecord(_))));
    assert!(has(|finding| matches!(finding, Finding::RecordWithoutPages(_))));
    assert!(has(|finding| matches!(finding, Finding::Unusable(..))));
    assert!(has(
        |finding| matches!(finding, Finding::FramesWithoutLeases(group) if group.as_str() == "gone")
    ));
    assert!(
        !path(0, "tenant.table").exists() && !path(1, "json").exists() && path(2, "json").exists()
    );
    assert_eq!(
        frames_taken(dir.path(), "tenant"),
        Bytes(2 * PAGE),
        "what only the lost ones had is gone"
    );
    store.audit().unwrap();
}

#[test]
fn without_its_frames_a_group_is_lost_and_says_so() {
    let dir = shm_dir();
    let leases = leases_with(dir.path(), &[1, 2]);
    fs::remove_file(dir.path().join("tenant.frames")).unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert_eq!((store.leases().len(), store.findings().len()), (0, leases.len()));
    let new = store.create(shared_record("tenant", Bytes::mib(1))).unwrap();
    new.write(0, &[9; PAGE_SIZE]).unwrap();
    store.audit().unwrap();
}
