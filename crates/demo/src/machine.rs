//! The kernel, accelerator and QEMU of the demos' guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_cli::commands::region::preload_library;
use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_page::{Bytes, RegionName};
use aquifer_vm::initrd::Modules;
use aquifer_vm::process::client;
use aquifer_vm::{Accelerator, Backing, Boot, Initrd, Processors, VmSpec};

use super::program;
use super::{guest, remove};

/// The directory of this system's kernels.
const BOOT: &str = "/boot";

/// QEMU's machine type of the guests.
pub const MACHINE: &str = "q35";

/// The kernel, accelerator and QEMU of a demo's guest.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The guest's kernel; `None` for the newest of this system.
    pub kernel: Option<PathBuf>,
    /// KVM or emulation.
    pub accelerator: Accelerator,
    /// QEMU's program.
    pub qemu: PathBuf,
}

impl Machine {
    pub(super) fn kernel(&self) -> Result<PathBuf> {
        self.kernel.clone().map_or_else(newest_kernel, Ok)
    }

    /// Returns a guest with its files in `dir`, these modules, and memory in RAM of this host.
    ///
    /// Its first process is `aquifer-demo guest-memory`.
    pub(super) fn guest(
        &self,
        dir: &Path,
        name: RegionName,
        memory: Bytes,
        modules: &[&str],
    ) -> Result<VmSpec> {
        let kernel = self.kernel()?;
        // init_on_alloc=0: the guest's kernel need not zero the memory that it gives up.
        let append = "console=ttyS0 quiet panic=-1 clearcpuid=cx16 \
                      memhp_default_state=online_movable init_on_alloc=0 rdinit=/init -- \
                      guest-memory";
        let plain = VmSpec::new(name, memory, Backing::Local { huge: None });
        Ok(VmSpec {
            processors: Processors {
                cpus: 2,
                accelerator: self.accelerator,
                ..plain.processors.clone()
            },
            machine: MACHINE.to_owned(),
            boot: Boot {
                initrd: Some(initrd(dir, &kernel, modules)?),
                kernel: Some(kernel),
                append: Some(append.to_owned()),
            },
            qemu: self.qemu.clone(),
            preload: preload_library()?,
            ..plain
        })
    }
}

/// Makes a guest's initramfs: this program as its first process, the agent, and modules.
pub(super) fn initrd(dir: &Path, kernel: &Path, modules: &[&str]) -> Result<PathBuf> {
    let what = || "creating the guest's initramfs";
    let exe = program::this()?;
    let agent = exe.with_file_name("aquifer-guest");
    let mut initrd = Initrd::default();
    initrd.copy(&exe, "/init").or_fail(what)?;
    initrd.copy(&agent, guest::AGENT).map_err(|error| {
        Failure::new(what(), error).help("install the agent 'aquifer-guest' beside this program")
    })?;
    let of = Modules::of(kernel).ok_or_else(|| {
        let why = format!("there are no modules of {} in lib/modules beside it", kernel.display());
        Failure::new(what(), why)
            .help("give --kernel a file named vmlinuz-RELEASE, or one with its modules beside it")
    })?;
    initrd.modules(&of, modules.iter().copied()).or_fail(what)?;
    let path = dir.join("initrd");
    fs::write(&path, initrd.finish()).or_fail(what)?;
    Ok(path)
}

/// Stops the guests of a killed demo and removes its files; its lender ended with it.
pub(super) fn clear(dir: &Path) {
    for vm in client::list(dir).unwrap_or_default() {
        let _ = client::stop(&vm, true, Duration::ZERO);
    }
    remove(dir);
}

/// Finds the newest kernel of this system.
fn newest_kernel() -> Result<PathBuf> {
    let found = fs::read_dir(BOOT).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_kernel = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
    };
    let when = |path: &PathBuf| fs::metadata(path).and_then(|data| data.modified()).ok();
    found.filter(is_kernel).max_by_key(when).ok_or_else(|| {
        Failure::new("finding a kernel for the guest", format!("there is no vmlinuz-* in {BOOT}"))
            .help(
                "give one by --kernel, or install one \
                 (Debian: apt-get install linux-image-cloud-amd64)",
            )
    })
}
