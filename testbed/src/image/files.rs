//! Files of this machine, with the shared libraries that they need.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tempfile::NamedTempFile;

use super::cpio::Archive;
use crate::command;

/// What has been put in so far.
#[derive(Debug, Default)]
pub(super) struct Files {
    libraries: HashSet<String>,
}

impl Files {
    /// Puts the file `here` into the guest as `there`, and the libraries that it needs where it looks for them.
    pub(super) fn put(&mut self, archive: &mut Archive, here: &Path, there: &str) -> Result<()> {
        ensure!(there.starts_with('/'), "'{there}' is no absolute path in a guest");
        let content = read(here)?;
        archive.file(there, &content);
        if is_program(&content) {
            for library in libraries(here)? {
                if self.libraries.insert(library.clone()) {
                    archive.file(&library, &read(library.as_ref())?);
                }
            }
        }
        Ok(())
    }
}

/// A file; of a program what it needs to run: symbols would only fill the guest's RAM.
fn read(path: &Path) -> Result<Vec<u8>> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !is_program(&content) {
        return Ok(content);
    }
    let stripped = NamedTempFile::new().context("cannot make a temporary file")?;
    command::run(Command::new("strip").args(["--strip-unneeded", "-o"]).args([stripped.path(), path]))?;
    Ok(fs::read(stripped.path())?)
}

fn is_program(content: &[u8]) -> bool {
    content.starts_with(b"\x7fELF")
}

/// The paths that ldd prints; none for a program that is linked statically, which ldd calls a failure.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let listed = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    ensure!(
        !listed.contains("not found"),
        "{} needs a library that is missing:\n{listed}",
        program.display()
    );
    let words = listed.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(words.map(|word| word.trim_end_matches(':').to_owned()).collect())
}
