//! The choice between KVM and emulation for guests.

use std::fs::{self, OpenOptions};
use std::time::Duration;

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_vm::Accelerator;

use crate::console::Console;
use crate::image::{self, Contents};
use crate::kernel::{Prepared, lock};
use crate::qemu::Machine;

/// Timeout of the probe guest's boot under KVM.
const PROBE_TIMEOUT: Duration = Duration::from_secs(8);

/// Returns KVM if a guest boots under it, else emulation: some machines offer `/dev/kvm`, but a
/// kernel hangs there. A file keeps the answer.
///
/// # Errors
/// If the probe cannot run, or its answer cannot be written.
pub(crate) fn find(kernel: &Prepared) -> Result<Accelerator> {
    let cache = crate::cache_dir()?;
    let _lock = lock(&cache.join("accelerator.lock"))?;
    let known = cache.join("accelerator");
    match fs::read_to_string(&known).unwrap_or_default().trim() {
        "kvm" => return Ok(Accelerator::Kvm),
        "tcg" => return Ok(Accelerator::Tcg),
        _ => {}
    }
    let boots = OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
        && boots_under_kvm(kernel)?;
    let (found, name) = if boots { (Accelerator::Kvm, "kvm") } else { (Accelerator::Tcg, "tcg") };
    fs::write(known, name)?;
    Ok(found)
}

fn boots_under_kvm(kernel: &Prepared) -> Result<bool> {
    let image = image::build(&Contents::default(), kernel)?;
    let machine = Machine {
        kernel,
        image: &image,
        memory: Bytes::mib(256),
        cpus: 1,
        disk: Bytes::ZERO,
        accelerator: Accelerator::Kvm,
        network: None,
    };
    let power = machine.power_on(&Console::new("probe", false))?;
    Ok(power.line.wait_until_ready(PROBE_TIMEOUT))
}
