//! The FUSE + loop backend against the kernel: what is written through the block device is what comes back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use aquifer_device::backend::{Attached, Backend, FuseLoop, Options};
use aquifer_device::{DeviceError, Disk};
use aquifer_page::{Bytes, PAGE_SIZE};
use common::aligned::Aligned;
use common::ram_disk::{FailingDisk, RamDisk};
use common::random::Random;

fn attach(disk: Arc<impl Disk>) -> Box<dyn Attached> {
    FuseLoop.attach(disk, &Options { workers: 4, label: "aquifer-test".to_owned() }).unwrap()
}

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn discard(device: &File, offset: u64, len: u64) {
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(device.as_fd(), flags, offset, len).unwrap();
}

fn queue(device: &dyn Attached, file: &str) -> String {
    let name = device.path().file_name().unwrap().to_str().unwrap();
    fs::read_to_string(format!("/sys/block/{name}/queue/{file}")).unwrap().trim().to_owned()
}

fn is_bound(path: &Path) -> bool {
    Path::new("/sys/block").join(path.file_name().unwrap()).join("loop").exists()
}

#[test]
fn the_device_has_the_volumes_size_and_page_sized_blocks_and_passes_discards_on() {
    let disk = RamDisk::new(Bytes::mib(64));
    let mut device = attach(disk);
    assert_eq!(queue(&*device, "logical_block_size"), "4096");
    assert_eq!(queue(&*device, "discard_granularity"), "4096");
    assert_ne!(queue(&*device, "discard_max_bytes"), "0");
    assert_eq!(queue(&*device, "rotational"), "0");
    let sectors =
        fs::read_to_string(Path::new("/sys/block").join(device.path().file_name().unwrap()).join("size"));
    assert_eq!(sectors.unwrap().trim(), (Bytes::mib(64).0 / 512).to_string());
    device.detach().unwrap();
}

#[test]
fn every_byte_written_in_parallel_comes_back_and_what_was_discarded_reads_as_zeros() {
    const THREADS: u64 = 4;
    const PAGES_EACH: u64 = 2048;
    let disk = RamDisk::new(Bytes(THREADS * PAGES_EACH * PAGE_SIZE as u64));
    let mut device = attach(disk.clone());
    let path = device.path().to_owned();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let path = &path;
            scope.spawn(move || model_run(path, thread * PAGES_EACH, PAGES_EACH, thread));
        }
    });
    let file = open_direct(&path);
    discard(&file, 0, disk.capacity().0);
    assert_eq!(disk.stored(), 0, "a discard of all gives all memory back");
    drop(file);
    device.detach().unwrap();
}

/// Random writes, reads and discards of 1 to 40 pages against a model, on pages that no other thread uses.
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
                discard(&device, offset, range.len() as u64);
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
fn a_flush_reaches_the_volume() {
    let disk = RamDisk::new(Bytes::mib(64));
    let mut device = attach(disk.clone());
    open_direct(device.path()).sync_all().unwrap();
    assert!(disk.flushes.load(Ordering::Relaxed) > 0);
    device.detach().unwrap();
}

#[test]
fn an_error_of_the_volume_is_an_error_of_the_device_and_the_next_request_is_served() {
    let mut device = attach(FailingDisk::new(Bytes::mib(64), 1 << 20));
    let file = open_direct(device.path());
    let mut page = Aligned::new(PAGE_SIZE);
    assert!(file.read_exact_at(&mut page, 1 << 20).is_err());
    assert!(file.write_all_at(&page, 1 << 20).is_err());
    file.read_exact_at(&mut page, 0).unwrap();
    drop(file);
    device.detach().unwrap();
}

#[test]
fn detaching_a_device_that_is_open_is_refused_and_it_goes_on_serving() {
    let mut device = attach(RamDisk::new(Bytes::mib(64)));
    let path = device.path().to_owned();
    let user = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT | libc::O_EXCL)
        .open(&path)
        .unwrap();
    let refused = device.detach().unwrap_err();
    assert!(matches!(refused, DeviceError::Busy { .. }), "{refused}");
    assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
    let mut page = Aligned::new(PAGE_SIZE);
    page.fill(7);
    user.write_all_at(&page, 4096).unwrap();
    drop(user);
    device.detach().unwrap();
    assert!(!is_bound(&path));
}

#[test]
fn nothing_is_left_of_a_device_that_was_dropped() {
    let device = attach(RamDisk::new(Bytes::mib(64)));
    let path = device.path().to_owned();
    drop(device);
    common::wait_for("the end of the loop device", common::SOON, || !is_bound(&path));
    assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains("aquifer"));
}
