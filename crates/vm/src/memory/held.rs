//! The memory of this host that its VMs may have, by their records alone: no process is asked.

use std::path::Path;

use aquifer_control::ledger::VmMemory as Held;
use aquifer_page::Bytes;
use aquifer_procfs::process;

use super::budget::{Budget, Kind, Share};
use super::resident::memory_files;
use crate::error::VmError;
use crate::process::{Files, client};

/// A VM whose memory is in RAM of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldMemory {
    /// The memory that the VM may have, and has.
    pub memory: Held,
    /// QEMU's process, once it runs.
    pub pid: Option<u32>,
}

/// Returns the VMs whose memory is in RAM of this host that the kernel has not set aside. The
/// memory of the others is a region, or huge pages: the kernel counts all of those as used.
///
/// # Errors
/// [`VmError::Io`] if the VMs or the budget cannot be read.
pub fn held(run_dir: &Path) -> Result<Vec<HeldMemory>, VmError> {
    if client::list(run_dir)?.is_empty() {
        return Ok(Vec::new());
    }
    let vms = Budget::of(run_dir).accounts()?.vms.into_iter();
    let local = vms.filter(|(_, share)| share.kind == Kind::Local);
    let local = local.map(|(name, share)| (Files::new(run_dir, &name), share));
    let in_small_pages = local.filter(|(files, _)| !files.has_huge_pages());
    in_small_pages.map(|(files, share)| of(&files, &share)).collect()
}

fn of(files: &Files, share: &Share) -> Result<HeldMemory, VmError> {
    let (pid, limits) = (files.pid(), files.limits()?);
    let memory = Held {
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
    fn vms_in_ram_of_this_host_count_with_floor_size_and_reserve() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(held(dir.path()).unwrap(), []);
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
        let memory = Held {
            name: "web".parse().unwrap(),
            floor: Bytes::mib(256),
            size: Bytes::mib(512),
            reserve: Bytes::mib(128),
            resident: Bytes::ZERO,
        };
        assert_eq!(held(dir.path()).unwrap(), [HeldMemory { memory, pid: None }]);
        fs::remove_dir_all(dir.path().join("vms/web")).unwrap();
        assert_eq!(held(dir.path()).unwrap(), [], "it has vanished");
    }
}
