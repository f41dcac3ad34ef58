//! Marks of running commands, by which the next command finds the remains of a dead one.
//!
//! A running command holds a lock on a file of its own. The kernel drops the lock when the process
//! ends, for whatever reason. Unlike a process id, a lock never passes to another process.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;

use aquifer_page::file;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};

/// A running command's mark, `DIR/KIND-PID.lock`. Its drop removes it; the kernel unlocks it when
/// the process dies.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    name: String,
    file: File,
}

impl Instance {
    /// Marks this process as a running command of this kind.
    ///
    /// # Errors
    /// If the directory or the file cannot be made, or if a mark with this process id exists. That
    /// one belongs to this process, or to a dead one that [`Instance::dead`] has not removed.
    pub fn claim(dir: &Path, kind: &str) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        let name = format!("{kind}-{}", process::id());
        let path = dir.join(format!("{name}.lock"));
        // Locked before it gets its name: a visible mark without a lock belongs to a dead process.
        let unnamed = dir.join(format!("{name}.new"));
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&unnamed)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        if let Err(error) = renameat_with(CWD, &unnamed, CWD, &path, RenameFlags::NOREPLACE) {
            let _ = fs::remove_file(&unnamed);
            return Err(error.into());
        }
        Ok(Self { path, name, file })
    }

    /// Returns the mark's name, `KIND-PID`, from which this command's other names derive.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Notes the remains to clean up if this process dies; replaces an earlier note.
    ///
    /// # Errors
    /// If the note cannot be written.
    pub fn note(&mut self, text: &str) -> io::Result<()> {
        let lock = |file: &File| Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?);
        self.file = file::replace_with(&self.path, text.as_bytes(), lock)?;
        Ok(())
    }

    /// Returns the marks of this kind with a dead process.
    ///
    /// This process holds each mark, so that no other command sees it, until its drop removes it.
    /// Drop it after all remains are cleaned up; [`Instance::keep`] it if some could not be.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn dead(dir: &Path, kind: &str) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let prefix = format!("{kind}-");
        let mut dead = Vec::new();
        for entry in entries {
            let file_name = entry?.file_name();
            let name = file_name.to_str().and_then(|name| name.strip_suffix(".lock"));
            if let Some(name) = name.filter(|name| name.starts_with(&prefix)) {
                dead.extend(Self::seize(dir, name)?);
            }
        }
        Ok(dead)
    }

    /// Returns the last note of the process.
    ///
    /// # Errors
    /// If the note cannot be read.
    pub fn read_note(&self) -> io::Result<String> {
        fs::read_to_string(&self.path)
    }

    /// Leaves the mark in its place, because the cleanup failed; the next command tries again.
    pub fn keep(mut self) {
        self.path = PathBuf::new();
    }

    /// Returns the mark of this name if its process is dead.
    fn seize(dir: &Path, name: &str) -> io::Result<Option<Self>> {
        let path = dir.join(format!("{name}.lock"));
        let file = match OpenOptions::new().write(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // With each note, a living process replaces the file by another locked one.
            Ok(()) if !file::is_at(&file, &path)? => Ok(None),
            Ok(()) => Ok(Some(Self { path, name: name.to_owned(), file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // A drop cannot report. The next command finds the mark and removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_living_command_is_not_taken_for_dead() {
        let dir = tempfile::tempdir().unwrap();
        let mut mine = Instance::claim(dir.path(), "run").unwrap();
        assert_eq!(Instance::dead(dir.path(), "run").unwrap().len(), 0);
        mine.note("a note").unwrap();
        assert_eq!(Instance::dead(dir.path(), "run").unwrap().len(), 0);
        drop(mine);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_dead_commands_note_is_found_once_and_only_under_its_kind() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("run-1.lock"), "what it left").unwrap();
        assert_eq!(Instance::dead(dir.path(), "export").unwrap().len(), 0);

        let mut dead = Instance::dead(dir.path(), "run").unwrap();
        assert_eq!((dead.len(), dead[0].name()), (1, "run-1"));
        assert_eq!(dead[0].read_note().unwrap(), "what it left");
        dead[0].note("what it left, again").unwrap();
        assert_eq!(Instance::dead(dir.path(), "run").unwrap().len(), 0, "held by the first finder");
        drop(dead);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn remains_that_could_not_be_removed_are_found_again() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("run-1.lock"), "").unwrap();
        Instance::dead(dir.path(), "run").unwrap().into_iter().for_each(Instance::keep);
        assert_eq!(Instance::dead(dir.path(), "run").unwrap().len(), 1);
    }
}
