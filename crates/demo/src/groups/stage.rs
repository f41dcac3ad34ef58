//! The stage of the demo: two groups and their guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_blockdev::swap;
use aquifer_cli::failure::{OrFail, Result};
use aquifer_group::{Agreement, Agreements, GroupEncryption};
use aquifer_page::{Bytes, Group, RegionName};
use aquifer_region::process::RegionSpec;
use aquifer_region::{LinkSpec, Paging};
use aquifer_vm::memory::{Limits, UNLIMITED};
use aquifer_vm::process::client::NewVm;
use aquifer_vm::process::{Files, client};
use aquifer_vm::{Backing, Boot, Processors, VmSpec};

use super::{BASE, MEMORY};
use crate::machine::{Machine, clear};
use crate::program;
use crate::user::User;
use crate::wait::Wait;

pub(super) const GROUPS: [&str; 2] = ["blue", "red"];

/// A guest.
#[derive(Debug)]
pub(super) struct Vm {
    pub(super) name: &'static str,
    pub(super) group: &'static str,
}

pub(super) const VMS: [Vm; 4] = [
    Vm { name: "blue-1", group: "blue" },
    Vm { name: "blue-2", group: "blue" },
    Vm { name: "red-1", group: "red" },
    Vm { name: "red-2", group: "red" },
];

/// Modules of a guest's kernel: its disk, its balloon, and the port of its agent.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "virtio_balloon", "virtio_console"];

/// The size of a guest's swap disk, and its device in the guest.
const SWAP: Bytes = Bytes::mib(256);
const SWAP_DEVICE: &str = "/dev/vda";

/// The emulated link to lenders. No page uses it: the caches hold all of the guests' memory.
const LINK: LinkSpec = LinkSpec { latency: Duration::from_micros(1), one_at_a_time: false };

/// The guests with their groups and files; its drop removes all of it.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) dir: PathBuf,
}

impl Stage {
    pub(super) fn set(dir: PathBuf, machine: &Machine) -> Result<Self> {
        fs::create_dir_all(&dir).or_fail(|| format!("making {}", dir.display()))?;
        // If a step fails, the drop of `stage` removes the files.
        let stage = Self { dir };
        let agreements = Agreements::of(&stage.groups());
        for name in GROUPS {
            let what = || format!("making group '{name}'");
            let group = name.parse().or_fail(what)?;
            agreements
                .create(&Agreement::new(group, GroupEncryption::Deterministic))
                .or_fail(what)?;
        }
        let image = machine.guest(&stage.dir, name(VMS[0].name)?, MEMORY, &MODULES)?;
        VMS.iter().try_for_each(|vm| stage.start(vm, &image))?;
        Ok(stage)
    }

    /// Returns the directory of the groups' agreements.
    pub(super) fn groups(&self) -> PathBuf {
        self.dir.join("groups")
    }

    /// Returns the directory of the regions.
    pub(super) fn regions(&self) -> PathBuf {
        self.dir.join("regions")
    }

    fn start(&self, vm: &Vm, image: &VmSpec) -> Result<()> {
        let what = || format!("starting guest '{}'", vm.name);
        let (name, group): (_, Group) = (name(vm.name)?, vm.group.parse().or_fail(what)?);
        let append = image.boot.append.as_deref().unwrap_or_default();
        let append = Some(format!("{append} --swap {SWAP_DEVICE}"));
        let spec = VmSpec {
            name: name.clone(),
            backing: Backing::Region,
            disks: vec![disk(&self.dir, vm.name)?],
            boot: Boot { append, ..image.boot.clone() },
            processors: Processors { cpus: 1, ..image.processors.clone() },
            ..image.clone()
        };
        // The cache has room for all of the memory.
        let cache = MEMORY + Bytes::mib(16);
        let paging = Paging { link: Some(LINK), ..Paging::default() };
        let region = RegionSpec { group, paging, ..RegionSpec::new(name, MEMORY, cache) };
        let limits = Limits { min: BASE, max: MEMORY, ..UNLIMITED };
        let exe = program::aquifer()?;
        let (memory, limits) = (Some(&region), &limits);
        let vm = NewVm { spec: &spec, memory, limits, definition: None };
        client::start(&exe, &self.dir, vm).or_fail(what)?;
        Ok(())
    }

    /// Waits until all guests have booted.
    pub(super) fn boot<'a>(&self, wait: Wait<'a>) -> Result<Vec<User<'a>>> {
        let meet = |vm: &Vm| User::meet(&Files::new(&self.dir, &name(vm.name)?).serial(), wait);
        let mut users = VMS.iter().map(meet).collect::<Result<Vec<_>>>()?;
        users.iter_mut().try_for_each(|user| user.is_there().map(drop))?;
        Ok(users)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        clear(&self.dir);
    }
}

pub(super) fn name(vm: &str) -> Result<RegionName> {
    vm.parse().or_fail(|| "naming a guest")
}

/// Makes a sparse disk that a guest can swap to.
fn disk(dir: &Path, vm: &str) -> Result<PathBuf> {
    let what = || format!("making a swap disk for guest '{vm}'");
    let path = dir.join(format!("{vm}.swap"));
    File::create(&path).and_then(|file| file.set_len(SWAP.0)).or_fail(what)?;
    swap::format(&path, SWAP, vm, 0).or_fail(what)?;
    Ok(path)
}
