//! The lock of a definition, and what only its holder may do.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{RegionName, file};

use super::{Definition, DefinitionError, Definitions};

/// How long another command may hold a definition: it may start a VM on a busy host.
const TIMEOUT: Duration = Duration::from_secs(150);

/// The interval between attempts.
const GLANCE: Duration = Duration::from_millis(20);

/// A definition that no other process changes, and whose VM no other process starts, until the
/// drop.
#[derive(Debug)]
pub struct Held {
    definitions: Definitions,
    name: RegionName,
    _lock: File,
}

impl Definitions {
    fn lock(&self, name: &RegionName) -> PathBuf {
        self.dir.join(format!(".{name}.lock"))
    }

    /// Holds a VM's definition, which need not exist. Waits while another process holds it.
    ///
    /// # Errors
    /// [`DefinitionError::Locked`] after a long wait; [`DefinitionError::Io`].
    pub fn hold(&self, name: &RegionName) -> Result<Held, DefinitionError> {
        self.make_dir().map_err(Self::io("cannot make", &self.dir))?;
        let path = self.lock(name);
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match try_lock(&path).map_err(Self::io("cannot lock", &path))? {
                Some(lock) => {
                    let definitions = self.clone();
                    return Ok(Held { definitions, name: name.clone(), _lock: lock });
                }
                None if Instant::now() < deadline => thread::sleep(GLANCE),
                None => {
                    let (name, seconds) = (name.clone(), TIMEOUT.as_secs());
                    return Err(DefinitionError::Locked { name, path, seconds });
                }
            }
        }
    }

    /// Returns whether another process holds a VM's definition.
    pub fn is_held(&self, name: &RegionName) -> bool {
        let lock = File::open(self.lock(name));
        lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Makes the directory, for root only: definitions name files of secrets.
    fn make_dir(&self) -> io::Result<()> {
        if self.dir.is_dir() {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        self.dir.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
    }
}

/// Locks a file that a holder may have removed meanwhile; returns `None` if another process has it.
fn try_lock(path: &Path) -> io::Result<Option<File>> {
    let lock =
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    match lock.try_lock() {
        Ok(()) if file::is_at(&lock, path)? => Ok(Some(lock)),
        Ok(()) | Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

impl Held {
    /// Returns the VM's name.
    pub fn name(&self) -> &RegionName {
        &self.name
    }

    /// Returns the path of the definition.
    pub fn file(&self) -> PathBuf {
        self.definitions.file(&self.name)
    }

    /// Reads the definition; returns `None` if there is none.
    ///
    /// # Errors
    /// Those of [`Definitions::find`].
    pub fn find(&self) -> Result<Option<Definition>, DefinitionError> {
        self.definitions.find(&self.name)
    }

    /// Reads the definition, which must exist.
    ///
    /// # Errors
    /// Those of [`Definitions::get`].
    pub fn get(&self) -> Result<Definition, DefinitionError> {
        self.definitions.get(&self.name)
    }

    /// Writes the definition of a VM that has none.
    ///
    /// # Errors
    /// [`DefinitionError::Exists`], also if the present file is damaged; those of [`Self::write`].
    pub fn create(&self, definition: &Definition) -> Result<(), DefinitionError> {
        let path = self.file();
        if fs::symlink_metadata(&path).is_ok() {
            return Err(DefinitionError::Exists { name: self.name.clone(), path });
        }
        self.write(definition)
    }

    /// Replaces the definition; returns once it survives a loss of power.
    ///
    /// # Errors
    /// [`DefinitionError::Io`]; the former definition then stays.
    pub fn write(&self, definition: &Definition) -> Result<(), DefinitionError> {
        let path = self.file();
        let write = || {
            let text = definition.text().map_err(io::Error::other)?;
            file::replace_durably(&path, text.as_bytes())
        };
        write().map_err(Definitions::io("cannot write", &path))
    }

    /// Removes the definition and its lock; returns once that survives a loss of power.
    ///
    /// # Errors
    /// [`DefinitionError::Unknown`]; [`DefinitionError::Io`].
    pub fn remove(self) -> Result<(), DefinitionError> {
        let path = self.file();
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DefinitionError::Unknown { name: self.name.clone(), path });
            }
            removed => removed.map_err(Definitions::io("cannot remove", &path))?,
        }
        // Another process that waits for this lock finds that it is gone, and makes a new one.
        let _ = fs::remove_file(self.definitions.lock(&self.name));
        let synced = File::open(&self.definitions.dir).and_then(|directory| directory.sync_all());
        synced.map_err(Definitions::io("cannot sync", &self.definitions.dir))
    }
}
