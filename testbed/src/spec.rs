//! What a host is to be like.

use std::fs::File;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use aquifer_page::Bytes;

use crate::image::{self, Contents};
use crate::kernel::Kernel;
use crate::qemu::{KERNEL_LINE, emulated};
use crate::wire::PORT;

/// What a guest boots from, emulated.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initrd: PathBuf,
    /// What it is told.
    pub append: String,
}

impl Parts {
    /// QEMU's arguments for the way by which a [`crate::Guest`] is told commands: a socket at `line`.
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

/// A host to be started. What is not said is: kernel 6.12, 256 MiB, one CPU, no disk, nothing but
/// busybox.
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
    /// A host that the others know by `name`.
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

    /// Its kernel.
    #[must_use]
    pub fn kernel(self, kernel: Kernel) -> Self {
        Self { kernel, ..self }
    }

    /// Its RAM, of which kernel and files take their part.
    #[must_use]
    pub fn memory(self, memory: Bytes) -> Self {
        Self { memory, ..self }
    }

    /// Its CPUs. Of several emulated ones, one often waits for a lock of another that this machine
    /// does not run at that time.
    #[must_use]
    pub fn cpus(self, cpus: u32) -> Self {
        Self { cpus, ..self }
    }

    /// A disk of this size, empty at each boot: `/dev/vda` once the module `virtio_blk` is loaded. It takes room where kernels are
    /// kept, and no page cache of this machine.
    #[must_use]
    pub fn disk(self, disk: Bytes) -> Self {
        Self { disk, ..self }
    }

    /// Loads a kernel module, and those that it needs, at boot: its name and, after a space, its parameters. One that the kernel
    /// has built in is fine, one that it does not have is an error.
    #[must_use]
    pub fn module(mut self, module: &str) -> Self {
        self.contents.modules.push(module.to_owned());
        self
    }

    /// The same for several.
    #[must_use]
    pub fn modules<'a>(self, modules: impl IntoIterator<Item = &'a str>) -> Self {
        modules.into_iter().fold(self, Self::module)
    }

    /// Puts the file `here` of this machine into the host as `there`; a program without its symbols, and with the shared
    /// libraries that it needs.
    #[must_use]
    pub fn file(mut self, here: impl Into<PathBuf>, there: &str) -> Self {
        self.contents.files.push((here.into(), there.to_owned()));
        self
    }

    /// Prints the host's console as it comes.
    #[must_use]
    pub fn live_console(self, live_console: bool) -> Self {
        Self { live_console, ..self }
    }

    /// What a QEMU that something else starts boots this host's system from: with a file in `dir`.
    ///
    /// # Errors
    /// If a kernel, a module or a file cannot be had.
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

    /// # Errors
    /// If the name cannot be a host's, or there is too little memory to boot in.
    pub(crate) fn check(&self) -> Result<()> {
        let name = &self.name;
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        ensure!(
            plain && !name.is_empty(),
            "'{name}' cannot be a host's name: letters, digits and hyphens can"
        );
        ensure!(
            self.memory >= Bytes::mib(96),
            "host {name} cannot boot in {}: give it 96MiB or more",
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
