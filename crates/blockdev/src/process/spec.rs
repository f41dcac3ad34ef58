//! The parameters, the record and the files of a volume process.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, VolumeId, file};
use aquifer_volume::{LeaseTarget, SecondCopy};
use serde::{Deserialize, Serialize};

use super::ProcessError;
use crate::BackendKind;

/// Hidden subcommand of the program that a volume process runs. The program's `main` must call
/// [`super::run()`] for it.
pub const SUBCOMMAND: [&str; 2] = ["serve", "volume"];

/// Parameters of a volume process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSpec {
    /// Id of the volume.
    pub volume: VolumeId,
    /// Size of the volume, and so of the device.
    pub capacity: Bytes,
    /// The leases of the volume; in a record, the leases at present.
    pub leases: Vec<LeaseTarget>,
    /// The backend that attaches the volume.
    pub backend: BackendKind,
    /// Number of threads that serve the device, each with a connection to each lender.
    pub workers: usize,
    /// Whether to swap to the device.
    pub swap: bool,
    /// Priority of the swap, 0 to 32767; the kernel uses higher ones first. With `None` the kernel
    /// assigns one below all others.
    pub priority: Option<u16>,
    /// Timeout of I/O to a lender that cannot be reached.
    pub io_timeout: Duration,
    /// Directory of the host's certificate, for leases reached over TLS.
    pub identity: Option<PathBuf>,
    /// Directory of the spill file, which takes extents when no lender can.
    pub spill: Option<PathBuf>,
    /// Directory under which the process keeps its files; see [`Files`].
    pub state: PathBuf,
    /// Data of the starter, kept in the record.
    #[serde(default)]
    pub note: serde_json::Value,
}

impl VolumeSpec {
    /// Default number of workers: enough that a slow lender does not block the others. More would
    /// only lock more memory in buffers.
    pub const DEFAULT_WORKERS: usize = 4;

    pub(super) fn files(&self) -> Files {
        Files::new(&self.state, self.volume)
    }

    /// Returns the mark of the volume's device, by which it can be identified.
    pub fn label(&self) -> String {
        label(self.volume)
    }
}

/// Returns the mark of the device of `volume`.
pub(super) fn label(volume: VolumeId) -> String {
    format!("aquifer-{volume}")
}

/// Number of logs kept of past volumes.
const KEPT_LOGS: usize = 8;

/// Paths of the files of one volume process.
#[derive(Clone, Debug)]
pub struct Files {
    /// Id of the volume.
    pub id: VolumeId,
    directory: PathBuf,
}

impl Files {
    /// Returns the paths for volume `id` under the state directory `state`.
    pub fn new(state: &Path, id: VolumeId) -> Self {
        Self { id, directory: state.join("volumes") }
    }

    /// Returns the paths of all volumes under `state`, served or left behind, in order of their
    /// ids.
    pub fn all(state: &Path) -> io::Result<Vec<Self>> {
        let directory = state.join("volumes");
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok());
            all.extend(id.map(|id| Self { id, directory: directory.clone() }));
        }
        all.sort_by_key(|files| files.id);
        Ok(all)
    }

    /// Returns the path of the record, which is locked while the volume is served.
    pub fn record(&self) -> PathBuf {
        self.directory.join(format!("{}.json", self.id))
    }

    /// Returns the path of the control socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join(format!("{}.sock", self.id))
    }

    /// Returns the path of the log.
    pub fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.id))
    }

    /// Reads the record; `None` if it is empty, because its process died early, or damaged.
    pub(super) fn read(&self) -> io::Result<Option<VolumeRecord>> {
        Ok(serde_json::from_str(&fs::read_to_string(self.record())?).ok())
    }

    /// Removes the log.
    pub(super) fn remove_log(&self) {
        // A log that stays is removed later with the old ones.
        let _ = fs::remove_file(self.log());
    }

    /// Removes all but the newest logs of volumes without a record. Such logs belong to volumes
    /// that ended with a failure.
    pub(super) fn remove_old_logs(&self) {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut logs: Vec<_> = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|kind| kind == "log"))
            .filter(|path| !path.with_extension("json").exists())
            .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
            .collect();
        logs.sort();
        for (_, path) in logs.iter().rev().skip(KEPT_LOGS) {
            let _ = fs::remove_file(path);
        }
    }

    /// Creates the directory, accessible to its owner only.
    pub(super) fn make_directory(&self) -> Result<(), ProcessError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(
            ProcessError::io(format!(
                "cannot make the directory {} for the volume's files",
                self.directory.display()
            )),
        )
    }

    /// Removes the socket and the record, but not the log.
    pub(super) fn remove(&self) {
        for path in [self.socket(), self.record()] {
            // A file that is missing or stays is harmless: the next process replaces it.
            let _ = fs::remove_file(path);
        }
    }
}

/// The record of a volume process, for later programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The parameters, with the leases at present.
    pub spec: VolumeSpec,
    /// Process id of the volume process.
    pub pid: u32,
    /// Path of the block device.
    pub device: PathBuf,
    /// The backend that made the device.
    pub backend: BackendKind,
    /// The second copies of leases' pages at present; `None` if the process is of an earlier
    /// version, which can begin none.
    #[serde(default)]
    pub copies: Option<Vec<SecondCopy>>,
}

impl VolumeRecord {
    /// Returns all leases at present, those that hold second copies last.
    pub fn leases(&self) -> impl Iterator<Item = &LeaseTarget> {
        self.spec.leases.iter().chain(self.copies.iter().flatten().map(|copy| &copy.lease))
    }
}

/// Time for which a lock is retried: a process that checks a record's lock holds it for a moment.
const LOCK_TIMEOUT: Duration = Duration::from_millis(300);

/// The open and locked record of a volume. While it is locked, no other process can serve the
/// volume or clean up after it.
#[derive(Debug)]
pub(super) struct Locked {
    path: PathBuf,
    file: File,
}

impl Locked {
    /// Creates the record if it is missing, and locks it. Returns [`ProcessError::Served`] while
    /// another process holds the lock.
    pub(super) fn take(files: &Files) -> Result<Self, ProcessError> {
        let path = files.record();
        let fail = || ProcessError::io(format!("cannot open and lock {}", path.display()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            let file = options.open(&path).map_err(fail())?;
            match file.try_lock() {
                // The previous holder of the lock may have removed or replaced the file after this
                // open.
                Ok(()) if file::is_at(&file, &path).map_err(fail())? => {
                    return Ok(Self { path, file });
                }
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) if Instant::now() > deadline => {
                    return Err(ProcessError::Served(files.id));
                }
                Err(fs::TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(5)),
                Err(fs::TryLockError::Error(error)) => return Err(fail()(error)),
            }
        }
    }

    /// Tells whether a process holds the record's lock.
    pub(super) fn is_taken(files: &Files) -> bool {
        let path = files.record();
        while let Ok(file) = File::open(&path) {
            match file.try_lock_shared() {
                Err(error) => return matches!(error, fs::TryLockError::WouldBlock),
                // The volume's process may have replaced the file since.
                Ok(()) if file::is_at(&file, &path).unwrap_or(true) => return false,
                Ok(()) => {}
            }
        }
        false
    }

    /// Empties the record, as nothing of the volume exists yet.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.replace(&[])
    }

    pub(super) fn write(&mut self, record: &VolumeRecord) -> io::Result<()> {
        self.replace(&serde_json::to_vec(record)?)
    }

    fn replace(&mut self, text: &[u8]) -> io::Result<()> {
        self.file = file::replace_with(&self.path, text, |file| Ok(file.try_lock()?))?;
        Ok(())
    }
}
