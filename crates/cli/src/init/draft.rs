//! A directory in which files are made before all of them move to their places.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

/// The directory of a draft; its drop removes it with all that is still in it.
#[derive(Debug)]
pub(super) struct Draft {
    /// The directory that gets the content.
    target: PathBuf,
    /// The draft itself, in `target`: renames need the same file system.
    path: PathBuf,
    /// Whether `target` was made for this draft.
    target_is_new: bool,
}

impl Draft {
    /// Makes an empty draft for `target`, and `target` if need be.
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub(super) fn begin(target: &Path) -> io::Result<Self> {
        let target_is_new = !target.exists();
        let make = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        make(target)?;
        let path = target.join(format!(".draft-{}", std::process::id()));
        // If a step fails, the drop of `draft` removes the directories.
        let draft = Self { target: target.to_owned(), path, target_is_new };
        // A killed process with the same id may have left a draft.
        let _ = fs::remove_dir_all(&draft.path);
        make(&draft.path)?;
        Ok(draft)
    }

    /// Returns the directory in which to make the files.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the files to their places; replaces files that are there.
    ///
    /// # Errors
    /// If a file cannot be moved. The files moved until then stay in their places.
    pub(super) fn keep(mut self) -> io::Result<()> {
        self.target_is_new = false;
        for entry in fs::read_dir(&self.path)? {
            let from = entry?.path();
            let to = self.target.join(from.file_name().unwrap_or_default());
            // A host's directory may hold files of other programs: those stay.
            if from.is_dir() && to.is_dir() {
                for entry in fs::read_dir(&from)? {
                    let from = entry?.path();
                    put(&from, &to.join(from.file_name().unwrap_or_default()))?;
                }
            } else {
                put(&from, &to)?;
            }
        }
        Ok(())
    }
}

/// Renames a file or directory; one that has the new name already gets the old name.
fn put(from: &Path, to: &Path) -> io::Result<()> {
    let flags = if to.exists() { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
    renameat_with(CWD, from, CWD, to, flags).map_err(io::Error::from)
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        if self.target_is_new {
            let _ = fs::remove_dir(&self.target);
        }
    }
}
