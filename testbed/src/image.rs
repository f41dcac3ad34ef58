//! A guest's root file system: an initramfs, built on demand and kept in memory.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use aquifer_vm::Initrd;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::kernel::Prepared;

/// The contents of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    /// Modules to load at boot, each with its parameters.
    pub(crate) modules: Vec<String>,
    /// Files of this machine, and their paths in the guest.
    pub(crate) files: Vec<(PathBuf, String)>,
}

/// The modules for a guest's port to the testbed and its network.
const TESTBED_MODULES: [&str; 3] = ["virtio_pci", "virtio_console", "virtio_net"];

/// Builds the image in a file without a name.
///
/// # Errors
/// If a file, a library that it needs, or a module cannot be read.
pub(crate) fn build(contents: &Contents, kernel: &Prepared) -> Result<File> {
    let mut initrd = Initrd::default();
    ["dev", "proc", "sys"].iter().for_each(|path| initrd.directory(path));
    initrd.copy("/bin/busybox".as_ref(), "/bin/busybox")?;
    initrd.copy(&crate::program("testbed-guest")?, "/init")?;
    for (here, there) in &contents.files {
        ensure!(there.starts_with('/'), "'{there}' is no absolute path in a guest");
        initrd.copy(here, there)?;
    }
    let requested = contents.modules.iter().map(String::as_str);
    let modules = TESTBED_MODULES.iter().copied().chain(requested);
    initrd.modules(&kernel.modules(), modules)?;
    let image = memfd_create("initramfs", MemfdFlags::CLOEXEC).context("cannot create a memfd")?;
    let mut image = File::from(image);
    image.write_all(&initrd.finish()).context("cannot write the guest's file system to a memfd")?;
    Ok(image)
}
