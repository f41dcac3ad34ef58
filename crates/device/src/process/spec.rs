use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, VolumeId, file};
use aquifer_pool::LeaseTarget;
use serde::{Deserialize, Serialize};

use super::ProcessError;
use crate::BackendKind;

/// The hidden subcommand of the program that a volume process is: its `main` must hand it to [`super::run()`].
pub const SUBCOMMAND: &str = "volume-serve";

/// Everything a volume process is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSpec {
    /// The volume.
    pub volume: VolumeId,
    /// Size of the volume, hence of the device.
    pub capacity: Bytes,
    /// The leases to lay it over. In a record: those that it is laid over now.
    pub leases: Vec<LeaseTarget>,
    /// How to attach it.
    pub backend: BackendKind,
    /// Threads that serve the device, each with a connection to each lender.
    pub workers: usize,
    /// Whether to swap on it.
    pub swap: bool,
    /// Priority of that swap, 0 to 32767, higher ones are used first; without one the kernel gives one below all others.
    pub priority: Option<u16>,
    /// How long I/O waits for a lender that cannot be reached.
    pub patience: Duration,
    /// Directory of the host's certificate, for leases reached over TLS.
    pub identity: Option<PathBuf>,
    /// Directory of the file that takes extents when no lender can.
    pub spill: Option<PathBuf>,
    /// Directory under which the process keeps its files; see [`Files`].
    pub state: PathBuf,
    /// Whatever the starter wants to find again in the record.
    #[serde(default)]
    pub note: serde_json::Value,
}

impl VolumeSpec {
    /// Workers unless told otherwise: enough that a slow lender does not hold up the others, few enough that their
    /// buffers, which are locked in memory, do not matter.
    pub const DEFAULT_WORKERS: usize = 4;

    pub(super) fn files(&self) -> Files {
        Files::new(&self.state, self.volume)
    }

    /// What the device is marked with, so that it can be told from others later.
    pub fn label(&self) -> String {
        label(self.volume)
    }
}

/// What the device of a volume is marked with.
pub(super) fn label(volume: VolumeId) -> String {
    format!("aquifer-{volume}")
}

/// How many logs of past volumes are kept.
const KEPT_LOGS: usize = 8;

/// The files of one volume process.
#[derive(Clone, Debug)]
pub struct Files {
    /// The volume.
    pub id: VolumeId,
    directory: PathBuf,
}

impl Files {
    /// Those of volume `id` under the state directory `state`.
    pub fn new(state: &Path, id: VolumeId) -> Self {
        Self { id, directory: state.join("volumes") }
    }

    /// Those of all volumes under `state`, served or left behind.
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

    /// What is served, and the lock that says that it is.
    pub fn record(&self) -> PathBuf {
        self.directory.join(format!("{}.json", self.id))
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join(format!("{}.sock", self.id))
    }

    /// The log.
    pub fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.id))
    }

    /// Reads the record; nothing where its writer died before it had anything to write, or it is damaged.
    pub(super) fn read(&self) -> io::Result<Option<VolumeRecord>> {
        Ok(serde_json::from_str(&fs::read_to_string(self.record())?).ok())
    }

    /// Removes the log.
    pub(super) fn remove_log(&self) {
        // One that stays is removed with the old ones.
        let _ = fs::remove_file(self.log());
    }

    /// Removes the logs of volumes that are gone, but for the newest ones: those are of volumes that ended otherwise than well.
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

    /// Makes the directory, for root only.
    pub(super) fn make_directory(&self) -> Result<(), ProcessError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(
            ProcessError::io(format!(
                "cannot make the directory {} for the volume's files",
                self.directory.display()
            )),
        )
    }

    /// Removes socket and record; the log stays.
    pub(super) fn remove(&self) {
        for path in [self.socket(), self.record()] {
            // A file that is not there, or cannot be removed, does no harm: the next process replaces it.
            let _ = fs::remove_file(path);
        }
    }
}

/// What a volume process was told and what came of it, for those who come later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// What it was told.
    pub spec: VolumeSpec,
    /// Its process id.
    pub pid: u32,
    /// The device.
    pub device: PathBuf,
    /// By which backend.
    pub backend: BackendKind,
}

/// Whoever looks whether a record is locked has it locked for a moment: a lock is tried again for this long.
const LOOK: Duration = Duration::from_millis(300);

/// The open and locked record of a volume. Nobody else can serve the volume or clean up after it meanwhile.
#[derive(Debug)]
pub(super) struct Locked {
    path: PathBuf,
    file: File,
}

impl Locked {
    /// Locks the record, making it if it is not there; [`ProcessError::Served`] while another process has it locked.
    pub(super) fn take(files: &Files) -> Result<Self, ProcessError> {
        let path = files.record();
        let fail = || ProcessError::io(format!("cannot open and lock {}", path.display()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let deadline = Instant::now() + LOOK;
        loop {
            let file = options.open(&path).map_err(fail())?;
            match file.try_lock() {
                // The process that had it before may have removed or replaced the file after we opened it.
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

    /// Whether a process has the record locked.
    pub(super) fn is_taken(files: &Files) -> bool {
        let path = files.record();
        while let Ok(file) = File::open(&path) {
            match file.try_lock_shared() {
                Err(error) => return matches!(error, fs::TryLockError::WouldBlock),
                // Its process may have put another in its place since.
                Ok(()) if file::is_at(&file, &path).unwrap_or(true) => return false,
                Ok(()) => {}
            }
        }
        false
    }

    /// Says that the volume is about to be served: there is nothing of it yet.
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
