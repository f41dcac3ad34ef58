//! The running scanner of a group: the lock that it holds, and its latest report.
//!
//! The kernel names the process that holds the lock. So a reader never takes the record of a dead
//! scanner for a running one, and never keeps a scanner from its lock.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use aquifer_control::group::scan_rate::Config;
use aquifer_page::Group;
use aquifer_region::process::record;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use rustix::process::{
    Flock, FlockType, Pid, PidfdFlags, Signal, fcntl_getlk, pidfd_open, pidfd_send_signal,
};
use serde::{Deserialize, Serialize};

use crate::{ScanError, ScanReport, failed};

/// The terms by which a scanner runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScannerTerms {
    /// Whether the host's agent started it, and may end it.
    pub by_agent: bool,
    /// How fast it scans.
    pub scan: Config,
    /// The cgroup that pays for it.
    pub cgroup: Option<PathBuf>,
}

/// A scanner that runs now.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningScanner {
    /// Its process.
    pub pid: Pid,
    /// Its terms; `None` until it has written them.
    pub terms: Option<ScannerTerms>,
    /// Its latest report; `None` in its first period.
    pub report: Option<ScanReport>,
}

/// What a scanner writes for others.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    pid: i32,
    terms: ScannerTerms,
    report: Option<ScanReport>,
}

/// The files of a group's scanner on a host. They outlive the group's regions.
#[derive(Clone, Debug)]
pub struct ScannerFiles {
    directory: PathBuf,
    group: Group,
}

impl ScannerFiles {
    /// Names the files of the scanner of `group`, whose regions are in `directory`.
    pub fn new(directory: &Path, group: &Group) -> Self {
        let directory = directory.parent().unwrap_or(directory).join("scanners");
        Self { directory, group: group.clone() }
    }

    /// Returns the groups that have such files, sorted by name.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn all(directory: &Path) -> io::Result<Vec<Group>> {
        let directory = directory.parent().unwrap_or(directory).join("scanners");
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut groups = Vec::new();
        for entry in entries {
            let file = entry?.file_name();
            let name = file.to_str().and_then(|name| name.strip_suffix(".lock"));
            groups.extend(name.and_then(|name| name.parse().ok()));
        }
        groups.sort();
        Ok(groups)
    }

    /// Ends this scanner, unless another process holds the lock by now.
    ///
    /// # Errors
    /// The system's.
    pub fn end(&self, scanner: Pid) -> io::Result<()> {
        let process = match pidfd_open(scanner, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Ok(()),
            process => process?,
        };
        // The descriptor stands for one process, and its number may be another's by now.
        if self.running()?.is_some_and(|running| running.pid == scanner) {
            pidfd_send_signal(&process, Signal::TERM)?;
        }
        Ok(())
    }

    /// Returns the log of scanners that an agent starts.
    pub fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.group))
    }

    fn lock_file(&self) -> PathBuf {
        self.directory.join(format!("{}.lock", self.group))
    }

    fn record(&self) -> PathBuf {
        self.directory.join(format!("{}.json", self.group))
    }

    /// Creates the directory of the files.
    ///
    /// # Errors
    /// The system's.
    pub fn create(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
    }

    /// Makes this process the group's scanner. It stays the scanner until the result is dropped.
    ///
    /// # Errors
    /// [`ScanError::Busy`] if another process is; [`ScanError::Io`] if the files fail.
    pub fn lock(&self, terms: ScannerTerms) -> Result<ScannerLock, ScanError> {
        let path = self.lock_file();
        self.create().map_err(failed("making", &self.directory))?;
        let mut options = OpenOptions::new();
        let file =
            options.create(true).truncate(false).write(true).read(true).mode(0o600).open(&path);
        let file = file.map_err(failed("opening", &path))?;
        match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => return Err(ScanError::Busy(self.group.clone())),
            Err(error) => return Err(failed("locking", &path)(error.into())),
        }
        let lock = ScannerLock { _file: file, files: self.clone(), terms };
        lock.write(None).map_err(failed("writing", &self.record()))?;
        Ok(lock)
    }

    /// Returns the group's scanner; `None` if no process is.
    ///
    /// # Errors
    /// If the lock's file cannot be read.
    pub fn running(&self) -> io::Result<Option<RunningScanner>> {
        let file = match File::open(self.lock_file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let holder = fcntl_getlk(&file, &Flock::from(FlockType::ReadLock))?;
        let Some(pid) = holder.and_then(|lock| lock.pid) else { return Ok(None) };
        // A record that cannot be read is one of another version.
        let record: Option<Record> = record::read(&self.record()).unwrap_or_default();
        let record = record.filter(|record| record.pid == pid.as_raw_nonzero().get());
        let (terms, report) =
            record.map_or((None, None), |record| (Some(record.terms), record.report));
        Ok(Some(RunningScanner { pid, terms, report }))
    }
}

/// The lock of a group's scanner, held by this process.
#[derive(Debug)]
pub struct ScannerLock {
    /// The kernel drops the lock when any descriptor of the file closes in this process.
    _file: File,
    files: ScannerFiles,
    terms: ScannerTerms,
}

impl ScannerLock {
    /// Shows others the latest report.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self, report: Option<&ScanReport>) -> io::Result<()> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let shown = Record { pid, terms: self.terms.clone(), report: report.cloned() };
        record::write(&self.files.record(), &shown)
    }
}

impl Drop for ScannerLock {
    fn drop(&mut self) {
        // Readers go by the lock; a record that stays does no harm.
        let _ = fs::remove_file(self.files.record());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn a_record_without_a_lock_is_no_running_scanner() {
        let dir = tempfile::tempdir().unwrap();
        let regions = dir.path().join("regions");
        let blue: Group = "blue".parse().unwrap();
        let files = ScannerFiles::new(&regions, &blue);
        assert!(ScannerFiles::all(&regions).unwrap().is_empty());
        assert_eq!(files.running().unwrap(), None);
        let terms =
            ScannerTerms { by_agent: true, scan: Config::default(), cgroup: Some("/blue".into()) };
        let lock = files.lock(terms).unwrap();
        // The kernel tells a process nothing of its own locks.
        assert_eq!(files.running().unwrap(), None);
        let text = fs::read_to_string(files.record()).unwrap();
        let record: Record = serde_json::from_str(&text).unwrap();
        assert_eq!(record.pid, std::process::id() as i32);
        assert!(record.terms.by_agent && record.report.is_none());
        drop(lock);
        fs::write(files.record(), text).unwrap();
        assert_eq!(files.running().unwrap(), None);
        assert_eq!(ScannerFiles::all(&regions).unwrap(), [blue]);
    }
}
