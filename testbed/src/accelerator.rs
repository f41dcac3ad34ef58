//! What runs a guest's instructions.

use std::fs::{self, OpenOptions};
use std::time::Duration;

use anyhow::Result;
use aquifer_guest::Accelerator;
use aquifer_page::Bytes;

use crate::console::Console;
use crate::image::{self, Contents};
use crate::kernel::{Prepared, lock};
use crate::qemu::Machine;

/// The time in which a guest boots under KVM, where it does.
const PROBE: Duration = Duration::from_secs(8);

/// KVM where a guest boots under it (there are machines that offer /dev/kvm and on which a kernel hangs); found out once.
///
/// # Errors
/// If that cannot be tried, or noted.
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
    Ok(power.line.wait_until_ready(PROBE))
}
