//! The records of directly attached subsystems.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use aquifer_page::{Bytes, VolumeId, file};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::super::{NvmeError, Root, SubsystemUri};
use super::{Controller, HostIdentity};

/// The record of an attachment, `direct/ID.json` in the state directory.
/// [`attach()`](super::attach()) writes it before it configures the kernel. After a crash at any
/// step, the kernel's objects can thus be found and removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Id of the attachment, of the same kind as a volume's.
    pub id: VolumeId,
    /// The subsystem.
    pub uri: SubsystemUri,
    /// The resolved address of the subsystem.
    pub address: SocketAddr,
    /// Identity that this host presents.
    pub host: HostIdentity,
    /// Whether the device serves swap.
    pub swap: bool,
    /// The block device; `None` until it appears.
    pub device: Option<PathBuf>,
    /// The kernel's name of the controller; `None` until it is connected. A reset of the host may
    /// change it.
    pub controller: Option<String>,
    /// Size of the device; zero until it appears.
    pub capacity: Bytes,
    /// Data of the caller of `attach`.
    #[serde(default)]
    pub note: serde_json::Value,
}

impl Record {
    /// Returns the kernel's state of the connection: `live` while the lender answers, `gone` if
    /// there is none.
    ///
    /// # Errors
    /// Fails if sysfs cannot be read.
    pub fn state(&self, root: &Root) -> Result<String, NvmeError> {
        let controllers = Controller::find(root, &self.uri.nqn, &self.host.nqn)?;
        Ok(controllers.first().map_or_else(|| "gone".to_owned(), Controller::state))
    }

    /// Returns all readable records in a state directory.
    ///
    /// # Errors
    /// Fails if the directory exists but cannot be read.
    pub fn all(state: &Path) -> Result<Vec<Self>, NvmeError> {
        let dir = dir(state);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => {
                entries.map_err(NvmeError::io(format_args!("cannot read {}", dir.display())))?
            }
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let records =
            paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(records.filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok()).collect())
    }
}

/// A record, locked against other processes. Dropping it releases the lock and keeps the file.
#[derive(Debug)]
pub(super) struct Held {
    path: PathBuf,
    file: File,
    pub(super) record: Record,
}

impl Held {
    /// Creates and locks a new record. Fails if one exists.
    pub(super) fn new(state: &Path, record: Record) -> Result<Self, NvmeError> {
        let (dir, path) = (dir(state), path(state, record.id));
        let fail = || NvmeError::io(format!("cannot write {}", path.display()));
        DirBuilder::new().recursive(true).mode(0o755).create(&dir).map_err(fail())?;
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(fail())?;
        lock(&file).map_err(fail())?;
        let mut held = Self { path: path.clone(), file, record };
        held.write()?;
        Ok(held)
    }

    /// Locks and reads an existing record.
    pub(super) fn take(state: &Path, id: VolumeId) -> Result<Self, NvmeError> {
        let path = path(state, id);
        let fail = || NvmeError::io(format!("cannot read {}", path.display()));
        let mut file = OpenOptions::new().read(true).write(true).open(&path).map_err(fail())?;
        let taken = lock(&file).and_then(|()| file::is_at(&file, &path));
        // If another file or none stands at the path, the process that held the lock has replaced
        // or removed the record.
        if !taken.unwrap_or(false) {
            return Err(NvmeError::new(format!("another process is attaching or detaching {id}"))
                .help("wait until it ends"));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(fail())?;
        let record = serde_json::from_slice(&text).map_err(|error| fail()(error.into()))?;
        Ok(Self { path, file, record })
    }

    /// Writes the current record to the file.
    pub(super) fn write(&mut self) -> Result<(), NvmeError> {
        let fail = || NvmeError::io(format!("cannot write {}", self.path.display()));
        let text = serde_json::to_vec(&self.record).map_err(|error| fail()(error.into()))?;
        self.file = file::replace_with(&self.path, &text, lock).map_err(fail())?;
        Ok(())
    }

    pub(super) fn remove(self) -> Result<(), NvmeError> {
        fs::remove_file(&self.path)
            .map_err(NvmeError::io(format_args!("cannot remove {}", self.path.display())))
    }
}

fn lock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

fn dir(state: &Path) -> PathBuf {
    state.join("direct")
}

fn path(state: &Path, id: VolumeId) -> PathBuf {
    dir(state).join(format!("{id}.json"))
}
