//! The memory that this host promises to its own VMs, regions, groups and exports.
//!
//! The driver reads it beside its periods, from the state directory: records and files first, and
//! at most one short request to an engine or a disk cache. One that does not answer keeps its last
//! figures or, before it ever answered, those of its record.
//!
//! An agent that watches a cgroup counts only what processes of that cgroup serve.
//!
//! - `regions`: regions, their groups, and disk caches. `exports`: exports made by hand.

mod exports;
mod regions;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_control::ledger::{OwnMemory, RegionMemory, VmMemory};
use aquifer_page::{Bytes, lock};
use aquifer_procfs::Cgroup;
use aquifer_vm::memory::InRegion;

use crate::monitor::Source;

/// How long an engine or a disk cache may take to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Reads the memory that this host promises. All clones share the latest reading.
#[derive(Clone, Debug)]
pub(crate) struct OwnReader(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    run_dir: PathBuf,
    /// The watched cgroup; `None` for the whole host.
    cgroup: Option<Cgroup>,
    /// Held only to copy the reading.
    latest: Mutex<OwnMemory>,
    /// Whether a reading is in progress.
    reading: AtomicBool,
}

impl OwnReader {
    /// Returns a reader with a first reading of the host whose processes have their files in
    /// `run_dir`.
    pub(crate) async fn open(run_dir: &Path, source: &Source) -> Self {
        let cgroup = match source {
            Source::Host => None,
            Source::Cgroup(cgroup) => Some(cgroup.clone()),
        };
        let (latest, reading) = (Mutex::default(), AtomicBool::new(false));
        let reader = Self(Arc::new(Inner { run_dir: run_dir.to_owned(), cgroup, latest, reading }));
        let inner = reader.0.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || inner.refresh()).await {
            tracing::warn!("cannot read the memory that this host promises: {error}");
        }
        reader
    }

    /// Returns the latest reading.
    pub(crate) fn latest(&self) -> OwnMemory {
        lock(&self.0.latest).clone()
    }

    /// Returns whether what this process makes counts.
    pub(crate) fn counts(&self, pid: u32) -> bool {
        Members::of(self.0.cgroup.as_ref()).has([pid])
    }

    /// Starts a reading on a blocking thread, unless one is in progress.
    pub(crate) fn refresh(&self) {
        if !self.0.reading.swap(true, Ordering::AcqRel) {
            let inner = self.0.clone();
            tokio::task::spawn_blocking(move || {
                inner.refresh();
                inner.reading.store(false, Ordering::Release);
            });
        }
    }
}

impl Inner {
    fn refresh(&self) {
        let last = lock(&self.latest).clone();
        let members = Members::of(self.cgroup.as_ref());
        let (mut regions, cache_limits, groups) = regions::read(&self.run_dir, &members, &last);
        let own = OwnMemory {
            vms: self.vms(&members, &last, &mut regions),
            regions,
            cache_limits,
            groups,
            exports: exports::read(&self.run_dir, &members),
        };
        *lock(&self.latest) = own;
    }

    /// Returns the VMs that take RAM of this host. Notes the present size of each in its region.
    fn vms(
        &self,
        members: &Members,
        last: &OwnMemory,
        regions: &mut [RegionMemory],
    ) -> Vec<VmMemory> {
        let held = match aquifer_vm::memory::held(&self.run_dir) {
            Ok(held) => held,
            Err(error) => {
                tracing::debug!("the VMs keep their last figures: {error}");
                for region in regions {
                    let known = last.regions.iter().find(|known| known.name == region.name);
                    region.vm_size = known.and_then(|known| known.vm_size);
                }
                return last.vms.clone();
            }
        };
        let own = held.local.into_iter().filter(|vm| members.has(vm.pid));
        let mut vms: Vec<_> = own.map(|vm| vm.memory).collect();
        for InRegion { name, size, reserve } in held.in_regions {
            // A region that does not count here belongs to a VM that does not count either.
            let Some(region) = regions.iter_mut().find(|one| one.name == name) else { continue };
            region.vm_size = Some(size);
            if reserve > Bytes::ZERO {
                vms.push(VmMemory::reserve_of(name, reserve));
            }
        }
        vms
    }
}

/// The processes whose promises count; `None` for all.
#[derive(Debug)]
struct Members(Option<BTreeSet<u32>>);

impl Members {
    fn of(cgroup: Option<&Cgroup>) -> Self {
        Self(cgroup.map(|cgroup| cgroup.processes().unwrap_or_default().into_iter().collect()))
    }

    fn is_whole_host(&self) -> bool {
        self.0.is_none()
    }

    /// Returns whether one of these processes counts.
    fn has(&self, pids: impl IntoIterator<Item = u32>) -> bool {
        let Some(all) = &self.0 else { return true };
        pids.into_iter().any(|pid| all.contains(&pid))
    }
}
