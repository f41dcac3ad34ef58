//! The options of a VM, and its start.

use std::path::{Path, PathBuf};

use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::RegionSpec;
use aquifer_region_client::Userfault;
use aquifer_vm::memory::{Limits, UNLIMITED};
use aquifer_vm::process::client::{self, NewVm};
use aquifer_vm::process::{Files, VmStatus};
use aquifer_vm::{Accelerator, Backing, Boot, NodeChoice, Processors, VmSpec};
use clap::{Args, ValueEnum};

use super::limits::Bounds;
use crate::agent_call::Socket;
use crate::claim::{Claimed, Overcommit};
use crate::commands::Common;
use crate::commands::region::{self, CacheSize, Cached, MaybeCached};
use crate::failure::{Failure, OrFail, Result};
use crate::lender::PastOwner;
use crate::progress::Progress;

/// The options of a VM.
#[derive(Debug, Args)]
pub(super) struct Guest {
    /// Memory of the VM at boot
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Maximum memory the VM can grow to; default --memory
    ///
    /// 'aquifer vm resize' and the balancer use it. The guest needs the virtio_mem driver (Linux
    /// 5.8 or later).
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Bytes>,
    #[command(flatten)]
    bounds: Bounds,
    #[command(flatten)]
    cached: MaybeCached,
    #[command(flatten)]
    overcommit: Overcommit,
    /// Use huge pages of this size, 2M or 1G
    ///
    /// The host must have reserved them (vm.nr_hugepages). By default pages are 4 KiB.
    #[arg(long, value_name = "SIZE")]
    huge_pages: Option<Bytes>,
    /// Number of virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// NUMA node whose memory and CPUs the VM uses: its number, 'auto' or 'any'
    ///
    /// 'auto' takes a node where the VM fits: the one with the fewest vCPUs per CPU, then the one
    /// with the most available memory. 'any' leaves the choice to the kernel. QEMU's threads stay
    /// on the node's CPUs. Memory that the node lacks comes from others. After a move to another
    /// host, a number counts as 'auto'.
    #[arg(long, value_name = "NODE", default_value_t)]
    node: NodeChoice,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    boot: BootOptions,
    #[command(flatten)]
    hardware: Hardware,
    /// Further arguments for QEMU
    #[arg(last = true, value_name = "ARGUMENT")]
    extra: Vec<String>,
}

/// The disks of a VM.
#[derive(Debug, Args)]
struct Disks {
    /// Disk: a file or block device; repeat for more
    ///
    /// The format is qcow2 if the name ends in .qcow2, else raw.
    #[arg(long = "disk", value_name = "FILE")]
    disks: Vec<PathBuf>,
    /// Disk behind the group's disk cache; repeat for more
    ///
    /// The agent runs the cache while a VM needs it; without an agent, run 'aquifer serve
    /// disk-cache'. These disks follow those of --disk.
    #[arg(long = "cached-disk", value_name = "FILE")]
    cached_disks: Vec<PathBuf>,
}

/// The kernel that a VM boots.
#[derive(Debug, Args)]
struct BootOptions {
    /// Linux kernel to boot; default the disk's boot loader
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Initial RAM disk for --kernel
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Kernel command line for --kernel
    #[arg(long, value_name = "LINE", requires = "kernel")]
    append: Option<String>,
}

/// The hardware that QEMU emulates.
#[derive(Debug, Args)]
struct Hardware {
    /// Accelerator
    #[arg(long, value_name = "WHAT", default_value = "auto")]
    accel: AcceleratorName,
    /// CPU model of the guest; default all features of this host
    ///
    /// This host must offer all features of the model ('qemu-system-x86_64 -cpu help' lists
    /// models). Without it, the VM can migrate only to hosts with the same features.
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
    /// QEMU machine type
    #[arg(long, value_name = "TYPE", default_value = "q35")]
    machine: String,
    /// QEMU program
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
}

/// The accelerator of a guest, as commands take it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum AcceleratorName {
    /// KVM if QEMU can use it, else emulation
    Auto,
    /// Hardware virtualization by /dev/kvm
    Kvm,
    /// Emulation, many times slower
    Tcg,
}

impl AcceleratorName {
    /// Returns the accelerator for this QEMU and machine type.
    pub fn choose(self, qemu: &Path, machine: &str) -> Accelerator {
        match self {
            Self::Auto => Accelerator::find(qemu, machine),
            Self::Kvm => Accelerator::Kvm,
            Self::Tcg => Accelerator::Tcg,
        }
    }
}

/// The definition by which a VM starts.
#[derive(Clone, Copy, Debug)]
pub(super) struct By<'a> {
    /// Its file.
    pub(super) file: &'a Path,
    /// The owner of the VM's pages at lenders.
    pub(super) owner: Option<PastOwner>,
}

impl Guest {
    /// Returns these limits, replaced where the options give a value.
    pub(super) fn limits_over(&self, before: Limits) -> Limits {
        self.bounds.over(before)
    }

    /// Returns the size of the local cache of a VM in a region.
    pub(super) fn cache(&self) -> Option<CacheSize> {
        self.cached.0.as_ref().map(Cached::cache)
    }

    /// Returns whether the host promises memory that it lacks.
    pub(super) fn overcommit(&self) -> Overcommit {
        self.overcommit
    }

    /// Returns whether the VM's memory is a region.
    pub(super) fn is_pooled(&self) -> bool {
        self.cached.0.is_some()
    }

    /// Returns the limits of the VM's memory.
    pub(super) fn limits(&self) -> Result<Limits> {
        let limits = self.bounds.over(UNLIMITED);
        limits.validate().or_fail(|| "checking the limits of the VM's memory")?;
        Ok(limits)
    }

    /// Starts the VM; returns its status.
    ///
    /// # Errors
    /// If an option is invalid, a lender refuses, memory is short, or QEMU does not start.
    pub(super) fn start(
        self,
        common: &Common,
        run_dir: &Path,
        name: &RegionName,
        by: Option<By<'_>>,
    ) -> Result<VmStatus> {
        let what = || format!("starting VM '{name}'");
        let limits = self.limits()?;
        let Self { memory, cached, .. } = self;
        let memory = memory.ok_or_else(|| {
            Failure::new(what(), "it has no size").help("give its memory with --memory SIZE")
        })?;
        let max_memory = self.max_memory.unwrap_or(memory);
        let _progress = Progress::spinner(what());
        cached.0.as_ref().map_or(Ok(()), |_| require_regions(what))?;
        cached.0.as_ref().map_or(Ok(()), |cached| cached.require_group(common))?;
        let claim = match (&cached.0, self.huge_pages) {
            // The kernel has set huge pages aside already.
            (None, Some(_)) => None,
            (Some(cached), _) => {
                let reserve = limits.reserve;
                Some(Claim { reserve, ..cached.claim(name, max_memory, memory) })
            }
            (None, None) => Some(claim(name, memory, limits.reserve)),
        };
        let absolute = |path: PathBuf| std::path::absolute(path).or_fail(what);
        let owner = by.and_then(|by| by.owner);
        let region = cached
            .0
            .map(|cached| cached.plan(common, (name.clone(), owner), max_memory))
            .transpose()?;
        // After the plan, as lenders may take longer to answer than a claim counts.
        let socket = Socket::of_environment();
        let claimed = claim
            .map(|claim| self.overcommit.claim(common, &socket, &what(), claim))
            .transpose()?;
        let backing = match region {
            Some(_) => Backing::Region,
            None => Backing::Local { huge: self.huge_pages },
        };
        let (disks, boot, hardware) = (self.disks, self.boot, self.hardware);
        let all = |paths: Vec<PathBuf>| paths.into_iter().map(absolute).collect::<Result<_>>();
        let spec = VmSpec {
            name: name.clone(),
            memory,
            max_memory,
            backing,
            processors: Processors {
                cpus: self.cpus,
                node: self.node,
                accelerator: hardware.accel.choose(&hardware.qemu, &hardware.machine),
                cpu: hardware.cpu,
            },
            machine: hardware.machine,
            disks: all(disks.disks)?,
            cached_disks: all(disks.cached_disks)?,
            boot: Boot {
                kernel: boot.kernel.map(absolute).transpose()?,
                initrd: boot.initrd.map(absolute).transpose()?,
                append: boot.append,
            },
            qemu: hardware.qemu,
            preload: region::preload_library()?,
            extra: self.extra,
        };
        let exe = std::env::current_exe().or_fail(what)?;
        let files = Files::new(run_dir, name);
        let start = |memory: Option<&RegionSpec>| {
            let definition = by.map(|by| by.file);
            let vm = NewVm { spec: &spec, memory, limits: &limits, definition };
            client::start(&exe, run_dir, vm).or_fail(what)
        };
        let status = match region {
            Some(plan) => {
                plan.make(|region| start(Some(region)), || _ = client::withdraw(&files))?
            }
            None => start(None)?,
        };
        claimed.into_iter().for_each(Claimed::keep);
        Ok(status)
    }
}

/// Refuses a region where no engine could serve it.
fn require_regions(what: impl FnOnce() -> String) -> Result<()> {
    let checked = Userfault::new().map(drop);
    checked.map_err(|error| {
        let why = format!("this process cannot serve page faults of the VM's memory: {error}");
        Failure::new(what(), why).help("use Linux 6.7 or later, as root, or give --cache none")
    })
}

/// Returns the claim for the memory of a VM that the command is about to start.
fn claim(name: &RegionName, bytes: Bytes, reserve: Bytes) -> Claim {
    let pid = Some(std::process::id());
    Claim { reserve, pid, ..Claim::new(name.clone(), ClaimPurpose::Vm, bytes) }
}
