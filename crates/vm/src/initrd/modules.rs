//! Kernel modules, uncompressed, and the order in which a guest loads them.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::Initrd;
use crate::error::VmError;

/// The guest's list of modules, in load order. A line holds a file name and, after a space,
/// parameters.
pub const ORDER: &str = "/modules/order";

/// The modules of one kernel.
#[derive(Clone, Debug)]
pub struct Modules {
    /// The directory that contains `lib/modules`.
    root: PathBuf,
    /// The kernel's release, as `uname -r` prints it.
    release: String,
}

impl Modules {
    /// Takes the modules in `root/lib/modules/release`.
    pub fn new(root: &Path, release: &str) -> Self {
        Self { root: root.to_owned(), release: release.to_owned() }
    }

    /// Finds the modules of the kernel in this file. A file `vmlinuz-RELEASE` has this system's
    /// modules; any other must have a single release in `lib/modules` beside it.
    pub fn of(kernel: &Path) -> Option<Self> {
        let name = kernel.file_name()?.to_str()?;
        if let Some(release) = name.strip_prefix("vmlinuz-") {
            return Some(Self::new(Path::new("/"), release));
        }
        let root = kernel.parent()?;
        let mut beside = fs::read_dir(root.join("lib/modules")).ok()?.flatten();
        let release = beside.next()?.file_name();
        beside.next().is_none().then(|| release.to_str().map(|release| Self::new(root, release)))?
    }

    /// Lists the files of a module and of its dependencies, in load order. The list is empty if the
    /// module is built into the kernel.
    ///
    /// # Errors
    /// If this kernel has no such module.
    pub fn files(&self, module: &str) -> io::Result<Vec<PathBuf>> {
        let mut modprobe = Command::new("modprobe");
        modprobe
            .args(["--set-version", &self.release, "--show-depends", module, "--dirname"])
            .arg(&self.root);
        let listed = output(&mut modprobe)?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let files = listed.lines().filter_map(|line| line.strip_prefix("insmod "));
        Ok(files.filter_map(|line| line.split(' ').next()).map(PathBuf::from).collect())
    }
}

impl Initrd {
    /// Adds modules, their dependencies and [`ORDER`]. Each name may have parameters after a space.
    ///
    /// # Errors
    /// [`VmError::Io`] if the kernel has no such module, or its file cannot be read.
    pub fn modules<'a>(
        &mut self,
        of: &Modules,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), VmError> {
        let mut known = HashSet::new();
        let mut order = String::new();
        for module in names {
            let (name, parameters) = module.split_once(' ').unwrap_or((module, ""));
            let fail =
                || VmError::io(format!("cannot add module '{name}' of kernel {}", of.release));
            let files = of.files(name).map_err(fail())?;
            let last = files.len().saturating_sub(1);
            for (index, path) in files.iter().enumerate() {
                if !known.insert(path.clone()) {
                    continue;
                }
                let (file, content) = read(path).map_err(fail())?;
                self.file(&format!("modules/{file}"), &content);
                order += &file;
                if index == last && !parameters.is_empty() {
                    order = order + " " + parameters;
                }
                order.push('\n');
            }
        }
        self.file(ORDER.trim_start_matches('/'), order.as_bytes());
        Ok(())
    }
}

/// Returns a module's file name without the suffix `.xz`, and its uncompressed content.
fn read(path: &Path) -> io::Result<(String, Vec<u8>)> {
    let name =
        path.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidInput)?;
    match name.strip_suffix(".xz") {
        Some(name) => {
            Ok((name.to_owned(), output(Command::new("xz").arg("-dc").arg(path))?.stdout))
        }
        None => Ok((name.to_owned(), fs::read(path)?)),
    }
}

fn output(command: &mut Command) -> io::Result<Output> {
    let done = command.stdin(Stdio::null()).output()?;
    if done.status.success() {
        return Ok(done);
    }
    let words = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    Err(io::Error::other(if words.is_empty() { done.status.to_string() } else { words }))
}
