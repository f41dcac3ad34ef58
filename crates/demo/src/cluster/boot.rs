//! What the demo's VMs boot from, and how they start.

use std::path::PathBuf;

use aquifer_cli::failure::Result;
use aquifer_page::Bytes;

use super::sharing::GROUP;
use super::stage::Member;
use crate::machine::{MACHINE, Machine, initrd};

/// Modules of a guest's kernel: its balloon, and the port of its agent.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_balloon", "virtio_console"];

/// The command line of a guest's kernel. Its first process is `aquifer-demo guest-memory`.
const APPEND: &str = "console=ttyS0 quiet panic=-1 clearcpuid=cx16 init_on_alloc=0 rdinit=/init \
                      -- guest-memory";

/// The kernel, initramfs, accelerator and QEMU of all VMs.
#[derive(Debug)]
pub(super) struct Boot {
    kernel: String,
    initrd: String,
    accelerator: String,
    qemu: String,
}

impl Boot {
    /// Makes the guests' initramfs in the directory of a host.
    pub(super) fn new(host: &Member, machine: &Machine) -> Result<Self> {
        let kernel = machine.kernel()?;
        let initrd = initrd(host.dir(), &kernel, &MODULES)?;
        let [kernel, initrd, qemu] =
            [&kernel, &initrd, &machine.qemu].map(|path| path.display().to_string());
        Ok(Self { kernel, initrd, accelerator: machine.accelerator.to_string(), qemu })
    }

    /// Creates a VM of the group, and starts it. The host's agent finds the lenders.
    pub(super) fn create(&self, host: &Member, vm: &str, memory: Bytes) -> Result<()> {
        let Self { kernel, initrd, accelerator, qemu } = self;
        let memory = memory.0.to_string();
        let words = ["vm", "create", vm, "--group", GROUP, "--memory", &memory];
        let boot = ["--kernel", kernel, "--initrd", initrd, "--append", APPEND];
        let by = ["--machine", MACHINE, "--accel", accelerator, "--qemu", qemu];
        host.run(&[&words[..], &boot, &by].concat())
    }
}

/// Returns the serial port of a VM on its host.
pub(super) fn serial(home: &Member, vm: &str) -> PathBuf {
    home.state().join("vms").join(vm).join("serial")
}
