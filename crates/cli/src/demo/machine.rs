//! What demos' guests run on.

use std::fs;
use std::path::PathBuf;

use aquifer_guest::Accelerator;

use crate::failure::{Failure, Result};

/// The kernel that this system would boot.
const BOOT: &str = "/boot";

/// QEMU's type of the guest's machine.
pub const MACHINE: &str = "q35";

/// What a demo's guest runs on.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The guest's kernel; the newest of this system unless told.
    pub kernel: Option<PathBuf>,
    /// What runs its code.
    pub accelerator: Accelerator,
    /// QEMU.
    pub qemu: PathBuf,
}

impl Machine {
    pub(super) fn kernel(&self) -> Result<PathBuf> {
        self.kernel.clone().map_or_else(newest_kernel, Ok)
    }
}

/// The newest kernel of this system.
fn newest_kernel() -> Result<PathBuf> {
    let found = fs::read_dir(BOOT).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_kernel =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"));
    let when = |path: &PathBuf| fs::metadata(path).and_then(|data| data.modified()).ok();
    found.filter(is_kernel).max_by_key(when).ok_or_else(|| {
        Failure::new("finding a kernel for the guest", format!("there is no vmlinuz-* in {BOOT}"))
            .help("name one by --kernel, or install one (Debian: apt-get install linux-image-cloud-amd64)")
    })
}
