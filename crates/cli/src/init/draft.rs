//! A directory in which files are made before all of them move to their places.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

/// The directory of a draft. Dropping it removes it with all that is still in it.
#[derive(Debug)]
pub(super) struct Draft {
    /// Where its content is to be.
    target: PathBuf,
    /// The draft itself, in `target`: on the same file system, so that its files can be renamed.
    path: PathBuf,
    /// `target` was made for this draft.
    target_is_new: bool,
}

impl Draft {
    /// An empty one for `target`, which is made if need be.
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub(super) fn begin(target: &Path) -> io::Result<Self> {
        let target_is_new = !target.exists();
        let make = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        make(target)?;
        let path = target.join(format!(".draft-{}", std::process::id()));
        // From here on, a failure takes away what was made.
        let draft = Self { target: target.to_owned(), path, target_is_new };
        // One that a killed process with the same id left.
        let _ = fs::remove_dir_all(&draft.path);
        make(&draft.path)?;
        Ok(draft)
    }

    /// Where files are to be made.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Moves what was made to its place. Files that were there before are replaced.
    ///
    /// # Errors
    /// If something cannot be moved. What was moved by then stays in its place.
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

/// Renames a file or directory; what had the name before takes the place of what it was renamed from.
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
