//! Tests that pages outlive the process that serves them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use aquifer_page::export::ExportError;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{Finding, LeaseRecord, Store, StoreError};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::common::{Random, one_lease, record, shared_record, shm_dir, taken};
use crate::example::example;

const PAGE: u64 = PAGE_SIZE as u64;
/// A child process; dropping it kills the child.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until the child prints a line with `text`.
fn wait_for(child: &mut Child, text: &str) {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut seen = Vec::new();
    for line in lines {
        let line = line.unwrap();
        if line.contains(text) {
            return;
        }
        seen.push(line);
    }
    panic!("the child ended without saying '{text}': {seen:?}");
}

#[test]
fn a_store_finds_its_leases_again_with_every_page() {
    let (dir, store, lease) = one_lease(Bytes::mib(16));
    lease.write(3 * PAGE, &[3; 2 * PAGE_SIZE]).unwrap();
    lease.write(1000 * PAGE + 7, b"hello").unwrap();
    lease.allocate_zeroes(2000 * PAGE, PAGE).unwrap();
    lease.set_note(serde_json::json!({"peer": "x"})).unwrap();
    let (record, stored) = (lease.record(), lease.stored());
    let runs: Vec<_> = lease.block_status(0, 16 << 20).unwrap().collect();
    drop((store, lease));

    let store = Store::open(dir.path()).unwrap();
    assert!(store.findings().is_empty());
    let lease = store.get(record.id).unwrap();
    assert_eq!(lease.record(), record);
    assert_eq!(lease.record().note["peer"], "x");
    assert_eq!((lease.stored().0, stored.0), (taken(dir.path(), &lease), 4 * PAGE));
    assert_eq!(lease.block_status(0, 16 << 20).unwrap().collect::<Vec<_>>(), runs);
    let mut bytes = [0; 5];
    lease.read(1000 * PAGE + 7, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
}

#[test]
fn a_killed_process_loses_nothing() {
    let dir = shm_dir();
    let mut guard = Guard(
        Command::new(example("aquifer-store", "store_writer"))
            .arg(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    wait_for(&mut guard.0, "all written");

    let refused = Store::open(dir.path()).unwrap_err();
    let StoreError::Busy { pid, .. } = &refused else { panic!("{refused}") };
    assert_eq!(*pid, guard.0.id().to_string());
    drop(guard);

    let store = Store::open(dir.path()).unwrap();
    let lease = store.leases().pop().unwrap();
    let mut bytes = [0; PAGE_SIZE];
    for page in 0..1024 {
        lease.read(page * PAGE, &mut bytes).unwrap();
        assert_eq!(bytes, [(page % 255 + 1) as u8; PAGE_SIZE], "page {page}");
    }
    assert_eq!(lease.stored().0, taken(dir.path(), &lease));
}

#[test]
fn leftovers_are_deleted_and_unknown_files_stay() {
    let dir = shm_dir();
    let store = Store::open(dir.path()).unwrap();
    let lease = |text: &str| {
        let lease = store.create(record(Bytes::mib(1), Bytes::mib(1))).unwrap();
        lease.write(0, text.as_bytes()).unwrap();
        dir.path().join(lease.id().to_string())
    };
    let [orphan, lost, broken, short, good] =
        ["orphan", "lost", "broken", "short", "good"].map(lease);
    drop(store);
    fs::remove_file(orphan.with_extension("json")).unwrap();
    fs::remove_file(lost.with_extension("pages")).unwrap();
    fs::write(broken.with_extension("json"), "{").unwrap();
    fs::File::options()
        .write(true)
        .open(short.with_extension("pages"))
        .unwrap()
        .set_len(PAGE)
        .unwrap();
    fs::write(good.with_extension("json.new"), "half").unwrap();
    fs::write(dir.path().join("README"), "not ours").unwrap();

    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.leases().len(), 1);
    let count = |matches: fn(&Finding) -> bool| {
        store.findings().iter().filter(|finding| matches(finding)).count()
    };
    assert_eq!(count(|finding| matches!(finding, Finding::PagesWithoutRecord(_))), 1);
    assert_eq!(count(|finding| matches!(finding, Finding::RecordWithoutPages(_))), 1);
    assert_eq!(count(|finding| matches!(finding, Finding::Unusable(..))), 2);
    for (path, extension, there) in [
        (&orphan, "pages", false),
        (&lost, "json", false),
        (&broken, "pages", true),
        (&short, "pages", true),
        (&good, "json.new", false),
    ] {
        assert_eq!(
            path.with_extension(extension).exists(),
            there,
            "{}.{extension}",
            path.display()
        );
    }
    assert!(dir.path().join("README").exists());
}

#[test]
fn a_directory_that_is_not_ram_is_refused() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let error = Store::open(dir.path()).unwrap_err();
    assert!(matches!(error, StoreError::NotTmpfs(_)));
    assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}");
}

/// Calls `check` on a thread that alone sees a tmpfs of 16 MiB at `dir`.
fn with_small_tmpfs(dir: &Path, check: impl FnOnce() + Send) {
    let mount_and_check = || {
        // SAFETY: the thread stops sharing its mounts and working directory only, and no other
        // thread relies on those of this one.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        mount("small", dir, "tmpfs", MountFlags::empty(), c"size=16m,mode=700").unwrap();
        check();
    };
    thread::scope(|scope| scope.spawn(mount_and_check).join())
        .unwrap_or_else(|panic| resume_unwind(panic));
}

/// Returns 1 MiB of pages that differ from each other and from those of other seeds.
fn unique(seed: u64) -> Vec<u8> {
    let mut data = vec![0; 1 << 20];
    Random(seed).fill(&mut data);
    data
}

fn fill_a_small_tmpfs(dir: &Path, record: LeaseRecord) {
    let store = Store::open(dir).unwrap();
    let lease = store.create(record).unwrap();
    // Every write has pages of its own content, so that sharing saves nothing.
    let block = unique(1);
    let full = (0..64).find_map(|at| lease.write(at << 20, &unique(at + 10)).err()).unwrap();
    let ExportError::NoMemory { lease: id, source } = &full else { panic!("{full}") };
    assert_eq!((*id, source.kind()), (lease.id(), std::io::ErrorKind::StorageFull));
    let stored = lease.stored();
    assert!(stored > Bytes::mib(14) && stored < Bytes::mib(16), "{stored}");

    // Stored pages stay readable and writable, and discarded ones make space for others.
    lease.write(0, &unique(2)).unwrap();
    lease.discard(1 << 20, 2 << 20).unwrap();
    lease.write(50 << 20, &block).unwrap();
    let mut bytes = vec![0; 1 << 20];
    lease.read(50 << 20, &mut bytes).unwrap();
    assert!(bytes == block);
    lease.read(0, &mut bytes).unwrap();
    assert!(bytes == unique(2));
    assert!((60..64).any(|at| lease.write(at << 20, &unique(at + 100)).is_err()));
    store.audit().unwrap();
    assert!(matches!(
        store.create(crate::common::record(Bytes::mib(1), Bytes::mib(1))),
        Ok(_) | Err(StoreError::File { .. })
    ));
}

#[test]
fn a_full_tmpfs_is_an_error_and_not_the_end() {
    let dir = shm_dir();
    with_small_tmpfs(dir.path(), || {
        fill_a_small_tmpfs(dir.path(), record(Bytes::mib(64), Bytes::mib(64)))
    });
}

#[test]
fn a_full_tmpfs_is_only_an_error_for_sharing_leases_too() {
    let dir = shm_dir();
    with_small_tmpfs(dir.path(), || {
        fill_a_small_tmpfs(dir.path(), shared_record("tenant", Bytes::mib(64)))
    });
}
