//! The specification of a host.

use std::fs::File;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use aquifer_page::Bytes;

use crate::image::{self, Contents};
use crate::kernel::Kernel;
use crate::qemu::{KERNEL_LINE, emulated};
use crate::wire::PORT;

/// The files and arguments from which an emulated guest boots.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Path of the uncompressed kernel.
    pub kernel: PathBuf,
    /// Path of the initramfs.
    pub initrd: PathBuf,
    /// Command line of the kernel.
    pub append: String,
}

impl Parts {
    /// Returns QEMU's arguments for the socket `line`, over which a [`crate::Guest`] gets its
    /// commands.
    pub fn arguments(&self, line: &Path) -> [String; 6] {
        [
            "-device".to_owned(),
            "virtio-serial-pci".to_owned(),
            "-chardev".to_owned(),
            format!("socket,id=line,server=on,wait=off,path={}", line.display()),
            "-device".to_owned(),
            format!("virtserialport,chardev=line,name={PORT}"),
        ]
    }
}

/// A host to start. Defaults: kernel 6.12, 256 MiB of RAM, one CPU, no disk, nothing but busybox.
#[derive(Clone, Debug)]
pub struct Spec {
    pub(crate) name: String,
    pub(crate) kernel: Kernel,
    pub(crate) memory: Bytes,
    pub(crate) cpus: u32,
    pub(crate) disk: Bytes,
    pub(crate) contents: Contents,
    pub(crate) live_console: bool,
}

impl Spec {
    /// Describes a host that the others know by `name`.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kernel: Kernel::V6_12,
            memory: Bytes::mib(256),
            cpus: 1,
            disk: Bytes::ZERO,
            contents: Contents::default(),
            live_console: false,
        }
    }

    /// Sets the kernel.
    #[must_use]
    pub fn kernel(self, kernel: Kernel) -> Self {
        Self { kernel, ..self }
    }

    /// Sets the RAM, at least 96 MiB; kernel and files take their part of it.
    #[must_use]
    pub fn memory(self, memory: Bytes) -> Self {
        Self { memory, ..self }
    }

    /// Sets the number of CPUs, 1 to 64. Of several emulated CPUs, one often waits for a lock of
    /// another that this machine does not run at that time.
    #[must_use]
    pub fn cpus(self, cpus: u32) -> Self {
        Self { cpus, ..self }
    }

    /// Adds a disk of this size, empty at each boot: `/dev/vda` once the module `virtio_blk` is
    /// loaded. The disk takes space beside the kernels, but no page cache of this machine.
    #[must_use]
    pub fn disk(self, disk: Bytes) -> Self {
        Self { disk, ..self }
    }

    /// Loads a kernel module and its dependencies at boot: its name and, after a space, its
    /// parameters. A built-in module is fine; a missing one is an error.
    #[must_use]
    pub fn module(mut self, module: &str) -> Self {
        self.contents.modules.push(module.to_owned());
        self
    }

    /// Loads several modules, as [`Self::module`] does.
    #[must_use]
    pub fn modules<'a>(self, modules: impl IntoIterator<Item = &'a str>) -> Self {
        modules.into_iter().fold(self, Self::module)
    }

    /// Puts the file `here` of this machine into the host as `there`. A program goes without its
    /// symbols and with its shared libraries.
    #[must_use]
    pub fn file(mut self, here: impl Into<PathBuf>, there: &str) -> Self {
        self.contents.files.push((here.into(), there.to_owned()));
        self
    }

    /// Sets whether to print the host's console as it comes.
    #[must_use]
    pub fn live_console(self, live_console: bool) -> Self {
        Self { live_console, ..self }
    }

    /// Makes the files from which another QEMU boots this host; the initramfs goes into `dir`.
    ///
    /// # Errors
    /// If a kernel, a module or a file is not available, or `dir` cannot be written.
    pub fn parts(&self, dir: &Path) -> Result<Parts> {
        let kernel = self.kernel.prepare()?;
        let mut image = image::build(&self.contents, &kernel)?;
        image.rewind()?;
        let initrd = dir.join("initrd");
        let mut file =
            File::create(&initrd).with_context(|| format!("cannot make {}", initrd.display()))?;
        io::copy(&mut image, &mut file)?;
        Ok(Parts {
            kernel: kernel.vmlinux().to_owned(),
            initrd,
            append: KERNEL_LINE.to_owned() + &emulated(),
        })
    }

    /// Checks the name, the memory and the CPUs.
    ///
    /// # Errors
    /// If the name cannot be a host's, the memory is below 96 MiB, or the CPUs are not 1 to 64.
    pub(crate) fn check(&self) -> Result<()> {
        let name = &self.name;
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        ensure!(
            plain && !name.is_empty(),
            "'{name}' cannot be a host's name: use letters, digits and hyphens"
        );
        ensure!(
            self.memory >= Bytes::mib(96),
            "host {name} cannot boot with {}: give it 96MiB or more",
            self.memory
        );
        ensure!(
            (1..=64).contains(&self.cpus),
            "host {name} cannot have {} CPUs: give it 1 to 64",
            self.cpus
        );
        Ok(())
    }
}
