//! Tests of every backend that this kernel has: the block device returns the written data.
//!
//! `AQUIFER_TEST_BACKENDS` names the backends that must be available, for guests with kernels that
//! have more of them.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use aquifer_blockdev::backend::{self, Attached, Backend, Options};
use aquifer_blockdev::{BackendKind, DeviceError, Disk};
use aquifer_page::{Bytes, PAGE_SIZE};

use crate::common::Random;
use crate::common::aligned::Aligned;
use crate::common::ram_disk::{FailingDisk, RamDisk};
use crate::common::sys::discard;

/// Returns the backends that work here.
fn available() -> impl Iterator<Item = &'static dyn Backend> {
    backend::backends().into_iter().filter(|backend| backend.probe().is_ok())
}

fn attach(backend: &dyn Backend, disk: Arc<impl Disk>) -> Box<dyn Attached> {
    eprintln!("backend {}", backend.kind());
    backend.attach(disk, &Options { workers: 4, spare: 0, label: label() }).unwrap()
}

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn sysfs(device: &Path, file: &str) -> Option<String> {
    let path = Path::new("/sys/block").join(device.file_name().unwrap()).join(file);
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns a mark for the devices of the calling test. Once a device is gone, another test may get
/// the same device name.
fn label() -> String {
    format!("aquifer-test-{}-{:?}", std::process::id(), thread::current().id())
}

fn is_up(device: &Path) -> bool {
    backend::is_marked(device, &label())
}

#[test]
fn the_backends_that_must_be_there_can_be_used() {
    let wanted = std::env::var("AQUIFER_TEST_BACKENDS").unwrap_or_else(|_| "fuse-loop".to_owned());
    let found: Vec<String> = available().map(|backend| backend.kind().to_string()).collect();
    for kind in wanted.split_ascii_whitespace() {
        assert!(
            found.iter().any(|found| found == kind),
            "{kind} is missing: {:?}",
            backend::probe()
        );
    }
    assert_eq!(backend::choose(BackendKind::Auto).unwrap().kind().to_string(), found[0]);
}

#[test]
fn the_device_has_the_volumes_size_and_passes_discards_on() {
    for backend in available() {
        let mut device = attach(backend, RamDisk::new(Bytes::mib(64)));
        let queue = |file: &str| sysfs(device.path(), &format!("queue/{file}")).unwrap();
        assert_eq!(queue("logical_block_size"), "4096");
        assert_eq!(queue("discard_granularity"), "4096");
        assert_ne!(queue("discard_max_bytes"), "0");
        assert_eq!(queue("rotational"), "0");
        assert_eq!(sysfs(device.path(), "size").unwrap(), (Bytes::mib(64).0 / 512).to_string());
        device.detach().unwrap();
    }
}

#[test]
fn parallel_writes_read_back_and_discards_read_as_zeros() {
    const THREADS: u64 = 4;
    const PAGES_EACH: u64 = 2048;
    for backend in available() {
        let disk = RamDisk::new(Bytes(THREADS * PAGES_EACH * PAGE_SIZE as u64));
        let mut device = attach(backend, disk.clone());
        let path = device.path().to_owned();
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let path = &path;
                scope.spawn(move || model_run(path, thread * PAGES_EACH, PAGES_EACH, thread));
            }
        });
        let file = open_direct(&path);
        discard(&file, 0, disk.capacity().0).unwrap();
        assert_eq!(disk.stored(), 0, "a discard of all gives all memory back");
        drop(file);
        device.detach().unwrap();
    }
}

/// Runs random writes, reads and discards of 1 to 40 pages against a model, on pages that no other
/// thread uses.
fn model_run(path: &Path, first: u64, pages: u64, seed: u64) {
    let device = open_direct(path);
    let mut random = Random(seed + 1);
    let mut model = vec![0u8; pages as usize * PAGE_SIZE];
    let mut buffer = Aligned::new(40 * PAGE_SIZE);
    for _ in 0..600 {
        let count = 1 + random.below(40);
        let start = random.below(pages - count);
        let range = start as usize * PAGE_SIZE..(start + count) as usize * PAGE_SIZE;
        let offset = (first + start) * PAGE_SIZE as u64;
        let data = &mut buffer[..range.len()];
        match random.below(5) {
            0 | 1 => {
                random.fill(data);
                device.write_all_at(data, offset).unwrap();
                model[range].copy_from_slice(data);
            }
            2 => {
                discard(&device, offset, range.len() as u64).unwrap();
                model[range].fill(0);
            }
            _ => {
                device.read_exact_at(data, offset).unwrap();
                assert!(*data == model[range], "pages {start}..{} of thread {seed}", start + count);
            }
        }
    }
}

#[test]
fn a_large_request_is_split_and_its_parts_arrive_in_order() {
    for backend in available() {
        let mut device = attach(backend, RamDisk::new(Bytes::mib(64)));
        let file = open_direct(device.path());
        let mut written = Aligned::new(4 << 20);
        Random(1).fill(&mut written);
        file.write_all_at(&written, 8 << 20).unwrap();
        let mut read = Aligned::new(4 << 20);
        file.read_exact_at(&mut read, 8 << 20).unwrap();
        assert!(*read == *written);
        drop(file);
        device.detach().unwrap();
    }
}

#[test]
fn a_flush_reaches_the_volume() {
    for backend in available() {
        let disk = RamDisk::new(Bytes::mib(64));
        let mut device = attach(backend, disk.clone());
        open_direct(device.path()).sync_all().unwrap();
        assert!(disk.flushes.load(Ordering::Relaxed) > 0);
        device.detach().unwrap();
    }
}

#[test]
fn a_volume_error_fails_one_request_and_the_next_is_served() {
    for backend in available() {
        let mut device = attach(backend, FailingDisk::new(Bytes::mib(64), 1 << 20));
        let file = open_direct(device.path());
        let mut page = Aligned::new(PAGE_SIZE);
        assert!(file.read_exact_at(&mut page, 1 << 20).is_err());
        assert!(file.write_all_at(&page, 1 << 20).is_err());
        file.read_exact_at(&mut page, 0).unwrap();
        drop(file);
        device.detach().unwrap();
    }
}

#[test]
fn detaching_a_held_device_is_refused_and_it_goes_on_serving() {
    for backend in available() {
        let mut device = attach(backend, RamDisk::new(Bytes::mib(64)));
        let path = device.path().to_owned();
        let mut exclusive = OpenOptions::new();
        exclusive.read(true).write(true).custom_flags(libc::O_DIRECT | libc::O_EXCL);
        let user = exclusive.open(&path).unwrap();
        let refused = device.detach().unwrap_err();
        assert!(matches!(refused, DeviceError::Busy { .. }), "{refused}");
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
        let mut page = Aligned::new(PAGE_SIZE);
        page.fill(7);
        user.write_all_at(&page, 4096).unwrap();
        drop(user);
        device.detach().unwrap();
        assert!(!is_up(&path));
    }
}

#[test]
fn nothing_is_left_of_a_device_that_was_dropped() {
    // Other programs may have mounts of their own.
    let mounts = || {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let ours = mounts.lines().filter(|mount| mount.contains("aquifer")).map(str::to_owned);
        ours.collect::<std::collections::HashSet<_>>()
    };
    let before = mounts();
    for backend in available() {
        let device = attach(backend, RamDisk::new(Bytes::mib(64)));
        let path = device.path().to_owned();
        assert!(is_up(&path));
        drop(device);
        crate::common::wait_until("the end of the device", || !is_up(&path));
    }
    let after = mounts();
    assert!(after.is_subset(&before), "{after:?}");
}
