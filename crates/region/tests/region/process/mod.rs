//! Regions with their processes, whose leases change while a program uses the region.

mod hand_over;
mod leases;
mod spill;
mod thin;
mod unwatched;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE};
use aquifer_region::process::{Files, RegionSpec, RegionStatus, client};
use aquifer_region_client::Region;
use aquifer_volume::LeaseTarget;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::pool::example::example;
use crate::common::pool::{OurLender, wait_until};

const EXTENTS: u64 = 3;

const SIZE: Bytes = Bytes(EXTENTS * EXTENT_SIZE);

/// The local cache, far smaller than the pages in use.
const CACHE: Bytes = Bytes::mib(1);

/// The pages of an extent that a test uses.
const USED: u64 = 400;

const WORDS: usize = PAGE_SIZE / 8;

fn program() -> PathBuf {
    example("aquifer-region", "region_process")
}

/// A region of three extents, mapped here; its drop removes the region.
struct Served {
    files: Files,
    region: Option<Region>,
    _directory: TempDir,
}

impl Served {
    /// Creates the region over these leases.
    fn new(leases: &[LeaseTarget]) -> Self {
        Self::with(|spec| spec.leases = leases.to_vec())
    }

    fn with(change: impl FnOnce(&mut RegionSpec)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = RegionSpec::new("items".parse().unwrap(), SIZE, CACHE);
        spec.io_timeout = Duration::from_secs(2);
        change(&mut spec);
        let regions = directory.path().join("regions");
        client::create(&program(), &regions, &spec).unwrap();
        let files = Files::new(&regions, &spec.name);
        let region = Some(Region::map(&files.region()).unwrap());
        Self { files, region, _directory: directory }
    }

    fn status(&self) -> RegionStatus {
        client::status(&self.files).unwrap()
    }

    /// Returns the numbers of the leases on record.
    fn leases(&self) -> Vec<u128> {
        client::record(&self.files).unwrap().leases.iter().map(|target| target.lease.0).collect()
    }

    fn evacuate(&self, lease: u128) -> Result<(), String> {
        client::evacuate(&self.files, LeaseId(lease), None, |_| ())
            .map_err(|error| error.to_string())
    }

    fn add(&self, lease: LeaseTarget) -> Result<(), String> {
        client::add_lease(&self.files, lease, None).map_err(|error| error.to_string())
    }

    /// Kills the engine, and waits for the next one.
    fn kill_engine(&self) {
        let before = self.status().pid;
        kill(before);
        wait_until("another engine serves the region", || {
            client::status(&self.files).is_ok_and(|status| status.pid != before)
        });
    }

    /// Kills the supervisor and the engine, and serves the region again.
    fn kill_all(&self) {
        let engine = self.status().pid;
        let stat = std::fs::read_to_string(format!("/proc/{engine}/stat")).unwrap();
        let supervisor = stat.rsplit(") ").next().unwrap().split(' ').nth(1).unwrap();
        kill(supervisor.parse().unwrap());
        kill(engine);
        wait_until("the region is served again", || client::start(&program(), &self.files).is_ok());
    }

    fn word(&self, page: u64, at: usize) -> &std::sync::atomic::AtomicU64 {
        &self.region.as_ref().unwrap().words()[page as usize * WORDS + at]
    }

    /// Fills a page with its version.
    fn write(&self, page: u64, version: u64) {
        (0..WORDS).for_each(|at| {
            self.word(page, at).store(content(page, version, at), Ordering::Relaxed)
        });
    }

    #[track_caller]
    fn check(&self, page: u64, version: u64) {
        for at in 0..WORDS {
            let is = self.word(page, at).load(Ordering::Relaxed);
            assert_eq!(is, content(page, version, at), "page {page}, version {version}, word {at}");
        }
    }

    fn write_all(&self, version: u64) {
        pages().for_each(|page| self.write(page, version));
    }

    #[track_caller]
    fn check_all(&self, version: u64) {
        pages().for_each(|page| self.check(page, version));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.region.take());
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.files.log()).unwrap_or_default();
            eprintln!("the engines' log:\n{log}");
        }
        // The engine notices the end of a program after a moment.
        wait_until("the region is removed", || client::remove(&self.files).is_ok());
    }
}

/// Returns the pages in use: some of each extent.
fn pages() -> impl Iterator<Item = u64> {
    let of_extent = EXTENT_SIZE / PAGE_SIZE as u64;
    (0..EXTENTS).flat_map(move |extent| (0..USED).map(move |page| extent * of_extent + page * 7))
}

fn content(page: u64, version: u64, at: usize) -> u64 {
    (page << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
}

/// Makes lenders for all extents of a region each.
fn lenders<const N: usize>() -> [OurLender; N] {
    std::array::from_fn(|_| OurLender::start(EXTENTS))
}

/// Returns whether this test cannot run here, as no region can be created.
fn cannot_run() -> bool {
    let lacks = !rustix::process::geteuid().is_root();
    if lacks {
        eprintln!("skipped: needs root");
    }
    lacks
}
