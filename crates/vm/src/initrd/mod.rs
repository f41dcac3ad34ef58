//! Initial RAM file systems for guests, made of programs of this host.

mod cpio;
mod elf;
mod modules;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use crate::error::VmError;
use cpio::Archive;
pub use modules::{Modules, ORDER};

/// An unfinished initial RAM file system, for QEMU's `-initrd`.
#[derive(Debug, Default)]
pub struct Initrd {
    archive: Archive,
    libraries: HashSet<String>,
}

impl Initrd {
    /// Adds a directory and its parents.
    pub fn directory(&mut self, path: &str) {
        self.archive.directory(path);
    }

    /// Adds an executable file and its parent directories.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.archive.file(path, content);
    }

    /// Adds this host's file `here` as `there`, an absolute path.
    ///
    /// A program loses the sections that only debuggers read. This function also adds the program's
    /// shared libraries, at the paths where the loader finds them.
    ///
    /// # Errors
    /// [`VmError::Io`] if a file cannot be read or a library is missing.
    pub fn copy(&mut self, here: &Path, there: &str) -> Result<(), VmError> {
        let fail = |path: &Path| {
            VmError::io(format!("cannot add {} to the guest's initrd", path.display()))
        };
        let content = fs::read(here).map_err(fail(here))?;
        let Some(headers) = elf::Headers::of(&content) else {
            self.archive.file(there, &content);
            return Ok(());
        };
        self.archive.file(there, &headers.lean());
        for library in libraries(here, &headers).map_err(fail(here))? {
            if self.libraries.insert(library.clone()) {
                let content = fs::read(&library).map_err(fail(library.as_ref()))?;
                let lean = elf::Headers::of(&content).map(|headers| headers.lean());
                self.archive.file(&library, &lean.unwrap_or(content));
            }
        }
        Ok(())
    }

    /// Returns the archive, in the format that the kernel unpacks.
    pub fn finish(self) -> Vec<u8> {
        self.archive.finish()
    }
}

/// Returns the paths of a program's or a library's shared libraries, and of its loader.
fn libraries(of: &Path, headers: &elf::Headers<'_>) -> io::Result<Vec<String>> {
    let loader = match headers.interpreter() {
        Some(loader) => loader.to_owned(),
        None if !headers.is_shared() => return Ok(Vec::new()),
        // A library has no loader of its own: take this program's.
        None => {
            let own = fs::read("/proc/self/exe")?;
            let own = elf::Headers::of(&own).and_then(|own| own.interpreter().map(str::to_owned));
            own.ok_or_else(|| io::Error::other("this program has no loader"))?
        }
    };
    let listed = Command::new(&loader).arg("--list").arg(of).output()?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    if text.contains("not found") {
        return Err(io::Error::other(format!("a shared library is missing:\n{text}")));
    }
    let mut paths: Vec<_> =
        text.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect();
    paths.push(loader);
    Ok(paths)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn a_copied_program_runs_from_the_archive() {
        let mut initrd = Initrd::default();
        let own = fs::read_link("/proc/self/exe").unwrap();
        initrd.copy(&own, "/init").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("archive");
        fs::write(&archive, initrd.finish()).unwrap();
        let unpack =
            "cd $0 && busybox cpio -i -d < archive && test -e lib64 -o -e lib && ./init --list";
        let unpacked = Command::new("sh").args(["-c", unpack]).arg(dir.path()).output().unwrap();
        let listed = String::from_utf8_lossy(&unpacked.stdout).into_owned();
        assert!(listed.contains("a_copied_program_runs_from_the_archive"), "{unpacked:?}");
        assert!(
            fs::metadata(dir.path().join("init")).unwrap().len() < fs::metadata(own).unwrap().len()
        );
    }
}
