//! Pinned pages, which a device may write to at any time. These tests are a program of their own,
//! as pinned memory of a process counts for all regions that it maps.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "region/common/mod.rs"]
mod common;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use aquifer_page::{Bytes, EXTENT_SIZE, PAGE_SIZE};
use aquifer_region::process::client::{self, By};
use aquifer_region::process::{Files, RegionSpec};
use aquifer_region::{PolicyKind, Scheme};
use aquifer_region_client::Region;
use common::pool::OurLender;
use common::pool::example::example;
use common::{PAGE, Setting};
use io_uring::{IoUring, opcode, types};

const PAGES: u64 = 128;
const WORDS: usize = PAGE_SIZE / 8;

/// Held by the test that has memory pinned.
static PINNING: Mutex<()> = Mutex::new(());

fn word(region: &Region, page: u64) -> u64 {
    region.words()[page as usize * WORDS].load(Ordering::Relaxed)
}

/// Makes the kernel read zeroes into the ring's first buffer, without the page table.
fn read_zeroes(ring: &mut IoUring, into: *mut u8) {
    let zeroes = File::open("/dev/zero").unwrap();
    let read = opcode::ReadFixed::new(types::Fd(zeroes.as_raw_fd()), into, PAGE_SIZE as u32, 0);
    // SAFETY: the buffer is a page of the region, which stays mapped.
    unsafe { ring.submission().push(&read.build()) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), PAGE_SIZE as i32);
}

#[test]
fn device_writes_to_pinned_pages_are_kept() {
    let _pinning = PINNING.lock().unwrap();
    let setting = Setting::new(PAGES);
    let serving = setting.serve(PAGES, PolicyKind::Fifo, Scheme::OnDemand);
    let region = setting.map();
    (0..PAGES)
        .for_each(|page| region.words()[page as usize * WORDS].store(page + 1, Ordering::Relaxed));
    serving.engine.persist().unwrap();
    let mut ring = IoUring::new(2).unwrap();
    let first = region.bytes().as_ptr().cast_mut().cast::<u8>();
    let buffer = libc::iovec { iov_base: first.cast(), iov_len: PAGE_SIZE };
    // SAFETY: the buffer is a page of the region, which stays mapped.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();

    // No page leaves, and the error says why.
    let refused = serving.engine.resize_cache(Bytes(64 * PAGE)).unwrap_err().to_string();
    assert!(refused.contains("pinned") && refused.contains("io_uring"), "{refused}");
    // The device's later write is no write of the program.
    serving.engine.persist().unwrap();
    read_zeroes(&mut ring, first);
    assert_eq!(word(&region, 0), 0);

    ring.submitter().unregister_buffers().unwrap();
    serving.engine.resize_cache(Bytes(64 * PAGE)).unwrap();
    assert!(serving.engine.usage().remote > Bytes::ZERO);
    (1..PAGES).for_each(|page| assert_eq!(word(&region, page), page + 1));
    assert_eq!(word(&region, 0), 0);
}

/// Punching a hole into a huge page that cannot be split would leave zeroes there.
#[test]
fn no_page_leaves_while_a_device_uses_a_huge_page() {
    let _pinning = PINNING.lock().unwrap();
    let lender = OurLender::start(1);
    let directory = tempfile::tempdir().unwrap();
    let size = Bytes(EXTENT_SIZE);
    let mut spec = RegionSpec::new("items".parse().unwrap(), size, size);
    (spec.auto, spec.began_local) = (true, true);
    spec.leases = vec![lender.lease(1)];
    let regions = directory.path().join("regions");
    client::create(&example("aquifer-region", "region_process"), &regions, &spec).unwrap();
    let files = Files::new(&regions, &spec.name);
    let region = Region::map(&files.region()).unwrap();
    let pages = size.pages();
    let fill = |seed: u64| {
        (0..pages).for_each(|page| {
            region.words()[page as usize * WORDS].store(page + seed, Ordering::Relaxed)
        });
    };
    let check =
        |seed: u64| (0..pages).for_each(|page| assert_eq!(word(&region, page), page + seed));
    fill(1);
    let ring = IoUring::new(2).unwrap();
    let first = region.bytes().as_ptr().cast_mut().cast();
    let buffer = libc::iovec { iov_base: first, iov_len: PAGE_SIZE };
    // SAFETY: the buffer is a page of the region, which stays mapped.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();

    let shrink = || client::resize_cache(&files, Bytes::mib(1), By::Agent);
    let refused = shrink().unwrap_err().to_string();
    let has_huge_pages = Path::new("/sys/kernel/mm/transparent_hugepage").exists();
    let reason = if has_huge_pages { "does not split the huge page at page 0" } else { "pinned" };
    assert!(refused.contains(reason), "{refused}");
    check(1);
    fill(2);
    check(2);

    ring.submitter().unregister_buffers().unwrap();
    shrink().unwrap();
    check(2);
    assert!(client::status(&files).unwrap().usage.remote > Bytes::ZERO);
    drop(region);
    client::remove(&files).unwrap();
}
