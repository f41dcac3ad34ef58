//! Debian's kernels, made ready to boot.

mod bzimage;
mod debian;

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, Error, Result, bail};
use aquifer_vm::initrd::Modules;
use rustix::fs::{FlockOperation, flock};

use crate::command;

/// A stock kernel of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// 6.1, from bookworm.
    V6_1,
    /// 6.12, from bookworm-backports.
    V6_12,
}

impl Kernel {
    /// All kernels, the oldest first.
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];

    /// Returns the suite of Debian with this kernel.
    fn suite(self) -> &'static str {
        match self {
            Self::V6_1 => "bookworm",
            Self::V6_12 => "bookworm-backports",
        }
    }

    /// Makes the kernel ready to boot: downloads and unpacks it on first use. Any number of
    /// processes may call it at a time.
    ///
    /// # Errors
    /// If the kernel cannot be downloaded or unpacked.
    pub fn prepare(self) -> Result<Prepared> {
        let cache = crate::cache_dir()?;
        let dir = cache.join(format!("kernel-{self}"));
        let _lock = lock(&cache.join(format!("kernel-{self}.lock")))?;
        if !dir.join("release").exists() {
            let work = cache.join(format!("kernel-{self}.new"));
            // A killed build may have left its directory.
            let _ = fs::remove_dir_all(&work);
            let built = self.build(&work).and_then(|()| Ok(fs::rename(&work, &dir)?));
            let _ = fs::remove_dir_all(&work);
            built.with_context(|| format!("cannot prepare kernel {self}"))?;
        }
        let release = fs::read_to_string(dir.join("release"))?.trim().to_owned();
        Ok(Prepared { dir, release })
    }

    fn build(self, work: &Path) -> Result<()> {
        let unpacked = work.join("package");
        fs::create_dir_all(&unpacked)?;
        let package = debian::download(self.suite(), &work.join("apt"))?;
        command::run(Command::new("dpkg-deb").arg("--extract").args([&package, &unpacked]))?;
        let boot = fs::read_dir(unpacked.join("boot"))?.flatten().map(|entry| entry.path());
        let image = boot.into_iter().find_map(|path| {
            let release = path.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
            Some((path, release))
        });
        let Some((image, release)) = image else {
            bail!("{} contains no kernel", package.display())
        };
        bzimage::unpack(&image, &work.join("vmlinux"))?;
        fs::rename(unpacked.join("lib"), work.join("lib"))?;
        command::run(Command::new("depmod").arg("--basedir").arg(work).arg(&release))?;
        fs::remove_dir_all(work.join("apt"))?;
        fs::remove_dir_all(unpacked)?;
        Ok(fs::write(work.join("release"), release + "\n")?)
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        })
    }
}

impl FromStr for Kernel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|kernel| kernel.to_string() == text);
        found.with_context(|| format!("there is no kernel '{text}': choose 6.1 or 6.12"))
    }
}

/// A kernel that is ready to boot.
#[derive(Clone, Debug)]
pub struct Prepared {
    dir: PathBuf,
    release: String,
}

impl Prepared {
    /// Returns the path of the uncompressed kernel. QEMU starts it directly (PVH), seconds faster
    /// than a kernel that unpacks itself under emulation.
    pub fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// Returns the release, as `uname -r` prints it in a guest.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Returns the kernel's modules.
    pub fn modules(&self) -> Modules {
        Modules::new(&self.dir, &self.release)
    }
}

/// Locks a file until the caller drops the result.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}
