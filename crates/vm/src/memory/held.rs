//! The memory of this host that its VMs may have, by their records alone: no process is asked.

use std::path::Path;

use aquifer_control::ledger::VmMemory;
use aquifer_page::{Bytes, RegionName};
use aquifer_procfs::process;

use super::budget::{Budget, Kind, Share};
use super::resident::memory_files;
use crate::error::VmError;
use crate::process::{Files, client};

/// The VMs that compete for RAM of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Those whose memory is in RAM of this host that the kernel has not set aside. Huge pages are
    /// set aside: the kernel counts all of them as used.
    pub local: Vec<HeldMemory>,
    /// Those in a region whose cache the agent sizes.
    pub in_regions: Vec<InRegion>,
}

/// A VM in a region whose cache the agent sizes. The rest of its memory is the region's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InRegion {
    /// The VM, and the region.
    pub name: RegionName,
    /// The present size of the VM's memory.
    pub size: Bytes,
    /// RAM of this host beyond that size that only this VM gets, if it runs out of memory.
    pub reserve: Bytes,
}

/// A VM whose memory is in RAM of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldMemory {
    /// The memory that the VM may have, and has.
    pub memory: VmMemory,
    /// QEMU's process, once it runs.
    pub pid: Option<u32>,
}

/// Returns the VMs that compete for RAM of this host.
///
/// # Errors
/// [`VmError::Io`] if the VMs or the budget cannot be read.
pub fn held(run_dir: &Path) -> Result<Held, VmError> {
    let mut held = Held::default();
    if client::list(run_dir)?.is_empty() {
        return Ok(held);
    }
    for (name, share) in Budget::of(run_dir).accounts()?.vms {
        match share.kind {
            Kind::Local => {
                let files = Files::new(run_dir, &name);
                if !files.has_huge_pages() {
                    held.local.push(of(&files, &share)?);
                }
            }
            Kind::Auto => {
                let (size, reserve) = (share.memory(), share.reserve);
                held.in_regions.push(InRegion { name, size, reserve });
            }
            Kind::Pool => {}
        }
    }
    Ok(held)
}

fn of(files: &Files, share: &Share) -> Result<HeldMemory, VmError> {
    let (pid, limits) = (files.pid(), files.limits()?);
    let memory = VmMemory {
        name: files.name().clone(),
        floor: limits.min,
        size: share.memory(),
        reserve: share.reserve,
        resident: pid.map_or(Bytes::ZERO, |pid| resident(files, pid)),
    };
    Ok(HeldMemory { memory, pid })
}

/// Returns the RAM that a VM's memory takes. The memory of an adopted VM may be in no file, so all
/// of its QEMU counts.
fn resident(files: &Files, pid: u32) -> Bytes {
    match files.is_adopted() {
        true => process::size(pid, "VmRSS"),
        false => memory_files(pid).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::fs;

    use aquifer_region::process::record;

    use super::*;
    use crate::memory::{Limits, UNLIMITED};

    #[test]
    fn vms_that_compete_for_ram_count_with_size_and_reserve() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(held(dir.path()).unwrap(), Held::default());
        let budget = Budget::of(dir.path());
        budget.set(Some(Bytes::mib(1024)), None).unwrap();
        let start = |vm: &str, share: Share, limits: Limits| {
            let files = dir.path().join("vms").join(vm);
            fs::create_dir_all(&files).unwrap();
            // A record that cannot be read does not prove that the VM is gone.
            fs::write(files.join("record.json"), "{}").unwrap();
            record::write(&files.join("limits.json"), &limits).unwrap();
            budget.admit(&vm.parse().unwrap(), &share).unwrap();
        };
        let mut share = Share::local(Bytes::mib(512));
        share.keep(Bytes::mib(128)).unwrap();
        start("web", share, Limits { min: Bytes::mib(256), ..UNLIMITED });
        let pooled = Share::pool(Bytes::mib(512), Bytes::mib(512), Bytes::mib(64));
        start("pooled", pooled, UNLIMITED);
        start("auto", Share::auto(Bytes::mib(128), Bytes::mib(256), Bytes::mib(256)), UNLIMITED);
        let memory = VmMemory {
            name: "web".parse().unwrap(),
            floor: Bytes::mib(256),
            size: Bytes::mib(512),
            reserve: Bytes::mib(128),
            resident: Bytes::ZERO,
        };
        let (size, reserve) = (Bytes::mib(128), Bytes::ZERO);
        let in_regions = vec![InRegion { name: "auto".parse().unwrap(), size, reserve }];
        let local = vec![HeldMemory { memory, pid: None }];
        let all = Held { local, in_regions };
        assert_eq!(held(dir.path()).unwrap(), all);
        fs::remove_dir_all(dir.path().join("vms/web")).unwrap();
        let left = Held { local: Vec::new(), ..all };
        assert_eq!(held(dir.path()).unwrap(), left, "it has vanished");
    }
}
