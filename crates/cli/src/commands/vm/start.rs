//! `aquifer vm start`.

use std::path::{Path, PathBuf};

use aquifer_vm::memory::UNLIMITED;
use aquifer_vm::process::{Files, client};
use aquifer_vm::{Accelerator, Backing, VmSpec};
use aquifer_page::{Bytes, RegionName};
use clap::{Args, ValueEnum};

use super::limits::Bounds;
use super::text;
use crate::commands::Common;
use crate::commands::region::{self, Cached, MaybeCached};
use crate::failure::{Failure, OrFail, Result};
use crate::output;
use crate::progress::Progress;

/// Starts a VM in the background
///
/// Returns when QEMU runs. The VM has a serial port, a balloon, a port for 'aquifer-guest run' in it, the disks that are named, and nothing else: no
/// network, no display. What follows '--' goes to QEMU as it is.
///
/// With --lender and --cache its memory is in the pool, with so much local RAM as its cache; without, it is in RAM of this host.
#[derive(Debug, Args)]
pub struct Start {
    /// The VM's name, and that of its region
    name: RegionName,
    /// Its memory when it boots
    #[arg(long, value_name = "SIZE")]
    memory: Bytes,
    /// What 'aquifer vm resize' and the balancer can have it grow to; --memory unless told. The guest needs the driver virtio_mem (Linux 5.8 or later)
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Bytes>,
    #[command(flatten)]
    bounds: Bounds,
    #[command(flatten)]
    cached: MaybeCached,
    /// Its memory is in pages of this size, 2M or 1G, of those that this host has set aside (vm.nr_hugepages)
    #[arg(long, value_name = "SIZE", conflicts_with = "cache")]
    huge_pages: Option<Bytes>,
    /// Its processors
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// A file or block device that is its disk, raw unless its name ends in .qcow2; can be given several times
    #[arg(long = "disk", value_name = "FILE")]
    disks: Vec<PathBuf>,
    /// Likewise, through the cache of its group's disks, which 'aquifer group cache' has to serve here; after those of --disk
    #[arg(long = "cached-disk", value_name = "FILE")]
    cached_disks: Vec<PathBuf>,
    /// A kernel to boot
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// What that kernel finds as its first file system
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// What that kernel is told
    #[arg(long, value_name = "LINE", requires = "kernel")]
    append: Option<String>,
    /// What runs its code
    #[arg(long, value_name = "WHAT", default_value = "auto")]
    accel: AcceleratorName,
    /// The processor that the guest sees, a model of 'qemu-system-x86_64 -cpu help' that this host must offer all of. Unless given, all that this
    /// host offers; such a VM can move only to hosts that offer as much
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
    /// QEMU's machine type
    #[arg(long, value_name = "TYPE", default_value = "q35")]
    machine: String,
    /// QEMU itself
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// More of QEMU's arguments
    #[arg(last = true, value_name = "ARGUMENT")]
    extra: Vec<String>,
}

/// What runs a guest's code, as commands take it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(in crate::commands) enum AcceleratorName {
    /// KVM where QEMU can use it, emulation elsewhere
    Auto,
    /// The processor, by /dev/kvm
    Kvm,
    /// Emulation
    Tcg,
}

impl AcceleratorName {
    /// Returns the accelerator for this QEMU and machine type.
    pub(in crate::commands) fn choose(self, qemu: &Path, machine: &str) -> Accelerator {
        match self {
            Self::Auto => Accelerator::find(qemu, machine),
            Self::Kvm => Accelerator::Kvm,
            Self::Tcg => Accelerator::Tcg,
        }
    }
}

impl Start {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let Self { name, memory, cached, .. } = self;
        let max_memory = self.max_memory.unwrap_or(memory);
        let what = || format!("starting VM '{name}'");
        let _progress = Progress::spinner(what());
        cached.0.as_ref().map_or(Ok(()), Cached::require_group)?;
        let absolute = |path: PathBuf| std::path::absolute(path).or_fail(what);
        let region =
            cached.0.map(|cached| cached.spec(common, name.clone(), max_memory)).transpose()?;
        let limits = self.bounds.over(UNLIMITED);
        limits.validate().map_err(|error| Failure::new(what(), error))?;
        let backing = match region {
            Some(_) => Backing::Region,
            None => Backing::Local { huge: self.huge_pages },
        };
        let spec = VmSpec {
            name: name.clone(),
            memory,
            max_memory,
            backing,
            cpus: self.cpus,
            accelerator: self.accel.choose(&self.qemu, &self.machine),
            cpu: self.cpu,
            machine: self.machine,
            disks: self.disks.into_iter().map(absolute).collect::<Result<_>>()?,
            cached_disks: self.cached_disks.into_iter().map(absolute).collect::<Result<_>>()?,
            kernel: self.kernel.map(absolute).transpose()?,
            initrd: self.initrd.map(absolute).transpose()?,
            append: self.append,
            qemu: self.qemu,
            preload: region::preload_library()?,
            extra: self.extra,
        };
        let exe = std::env::current_exe().or_fail(what)?;
        let status = client::start(&exe, run_dir, &spec, region.as_ref(), &limits).or_fail(what)?;
        output::answer(common.json, &status, |status| text(&Files::new(run_dir, &name), status))
    }
}
