//! The options of demos with a guest.

use std::path::PathBuf;

use aquifer_cli::commands::vm::AcceleratorName;
use aquifer_cli::failure::{OrFail, Result};
use clap::Args;

use crate::machine::{MACHINE, Machine};

/// The kernel and the machine of a demo's guest.
#[derive(Debug, Args)]
pub(super) struct Guest {
    /// Kernel of the guest; default the newest in /boot
    ///
    /// Its modules are in lib/modules beside it, if it needs any.
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Accelerator
    #[arg(long, value_name = "WHAT", default_value = "auto")]
    accel: AcceleratorName,
    /// QEMU program
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
}

impl Guest {
    pub(super) fn machine(self) -> Result<Machine> {
        let Self { kernel, accel, qemu } = self;
        let kernel =
            kernel.map(std::path::absolute).transpose().or_fail(|| "finding the kernel")?;
        Ok(Machine { kernel, accelerator: accel.choose(&qemu, MACHINE), qemu })
    }
}
