//! The paths and records of a region, and of its group.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, Group, RegionName, VolumeId};
use aquifer_volume::{DiskCopies, LeaseTarget, SecondCopy, SpillFile, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::record;
use super::regions::{self, UNFINISHED};
use crate::engine::Paging;
use crate::error::RegionError;
use crate::frames;

/// The specification of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionSpec {
    /// The name of the region and of its file.
    pub name: RegionName,
    /// The region's size, in whole pages.
    pub size: Bytes,
    /// The limit of its local cache.
    pub cache: Bytes,
    /// Whether the host's agent chooses that limit. Such a region begins with a cache as large as
    /// itself and without leases; the agent borrows them before the first page must leave.
    #[serde(default)]
    pub auto: bool,
    /// Whether the region began so, or has had leases. Without leases, its pages then stay in the
    /// cache. Those of any other region without leases go to a file, for experiments.
    #[serde(default)]
    pub began_local: bool,
    /// Its tenant; a limit can cover all caches of a group.
    pub group: Group,
    /// How its pages come and leave.
    #[serde(flatten)]
    pub paging: Paging,
    /// The id of its volume.
    pub volume: VolumeId,
    /// The leases that hold its pages.
    pub leases: Vec<LeaseTarget>,
    /// The file for pages that no lender has room for, if the region has one. Each host has its
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spill: Option<SpillFile>,
    /// The leases that hold second copies of pages. Each host has its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<SecondCopy>,
    /// Where second copies of its pages are on the host's disk, if there are any. Each host has its
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskCopies>,
    /// How long a fetch waits for an unreachable lender before it fails and is retried.
    pub io_timeout: Duration,
    /// The directory of the host's certificate, for leases over TLS.
    pub identity: Option<PathBuf>,
}

impl RegionSpec {
    /// Returns the specification without the keys of encrypted leases and of files on the disk, for
    /// display and logs.
    #[must_use]
    pub fn without_keys(mut self) -> Self {
        let copies = self.copies.iter_mut().map(|copy| &mut copy.lease);
        self.leases.iter_mut().chain(copies).for_each(|lease| lease.encryption = None);
        Self { spill: None, disk: None, ..self }
    }

    /// Returns the specification without files on the disk and second copies, for another host.
    #[must_use]
    pub fn for_another_host(self) -> Self {
        Self { spill: None, copies: Vec::new(), disk: None, ..self }
    }

    /// Returns the capacity of its leases.
    pub fn leased(&self) -> Bytes {
        self.leases.iter().map(|lease| lease.capacity).sum()
    }

    /// Makes a specification without leases, and with defaults otherwise.
    pub fn new(name: RegionName, size: Bytes, cache: Bytes) -> Self {
        Self {
            name,
            size,
            cache,
            auto: false,
            began_local: false,
            group: Group::default(),
            paging: Paging::default(),
            volume: VolumeId::random(),
            leases: Vec::new(),
            spill: None,
            copies: Vec::new(),
            disk: None,
            io_timeout: VolumeConfig::DEFAULT_IO_TIMEOUT,
            identity: None,
        }
    }
}

/// The files that the regions of a group share on a host.
#[derive(Clone, Debug)]
pub struct GroupFiles {
    directory: PathBuf,
}

impl GroupFiles {
    /// Names the files of a group that has its regions in `directory`. No region can have such a
    /// name.
    pub fn new(directory: &Path, group: &Group) -> Self {
        Self { directory: directory.join(format!("@{group}")) }
    }

    /// Returns the directory of these files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of the frames, the pages that are kept once.
    pub fn frames(&self) -> PathBuf {
        self.directory.join("frames")
    }

    /// Returns the path of the lock that the scanner holds while it frees frames. No page becomes
    /// shared meanwhile.
    pub fn giving(&self) -> PathBuf {
        frames::giving(&self.frames())
    }

    /// Returns the path of the record of another group that pays for this group's scans, if one
    /// does.
    pub fn cpu_billing(&self) -> PathBuf {
        self.directory.join("cpu_billing")
    }

    /// Returns the path of the socket on which the group's disk cache serves its disks, by NBD.
    pub fn cache_disks(&self) -> PathBuf {
        self.directory.join("cache.nbd")
    }

    /// Returns the path of the disk cache's control socket, for its status and its size.
    pub fn cache_control(&self) -> PathBuf {
        self.directory.join("cache.control")
    }

    /// Returns the path of the lock that the disk cache's process holds.
    pub fn cache_lock(&self) -> PathBuf {
        self.directory.join("cache.lock")
    }

    /// Creates the directory, and mounts the tmpfs of regions if there is none yet.
    ///
    /// # Errors
    /// [`RegionError::Io`].
    pub fn create(&self) -> Result<(), RegionError> {
        let regions = self.directory.parent().unwrap_or(Path::new("/"));
        let made = regions::ensure(regions).and_then(|_held| {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
        });
        made.map_err(RegionError::io(format!(
            "cannot create {} (needs root)",
            self.directory.display()
        )))
    }

    /// Removes the directory if it is empty, and then the tmpfs of regions if that is empty.
    pub fn release(&self) {
        // Fails if the directory is not empty.
        let _ = fs::remove_dir(&self.directory);
        if let Some(regions) = self.directory.parent() {
            regions::release_soon(regions);
        }
    }
}

/// The file of a region's record.
const RECORD: &str = "record.json";

/// The files of a region.
#[derive(Clone, Debug)]
pub struct Files {
    directory: PathBuf,
    name: RegionName,
}

impl Files {
    /// Names the files of the region `name`, with its file in `directory`.
    pub fn new(directory: &Path, name: &RegionName) -> Self {
        Self { directory: directory.to_owned(), name: name.clone() }
    }

    /// Returns the files of all regions in a directory.
    pub(super) fn all(directory: &Path) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let name = name.to_str().and_then(|name| name.strip_prefix('.'));
            let name = name.and_then(|name| name.parse().ok());
            all.extend(name.map(|name| Self::new(directory, &name)).filter(Self::may_exist));
        }
        all.sort_by(|one, two| one.name.cmp(&two.name));
        Ok(all)
    }

    /// Returns whether the region may exist. If this user may not know, a read of its record tells.
    fn may_exist(&self) -> bool {
        self.record().try_exists().unwrap_or(true)
    }

    /// Returns the runtime directory of Aquifer, if regions are at their default place in it.
    pub fn run_dir(&self) -> Option<&Path> {
        self.directory.parent()
    }

    /// Returns the region's name.
    pub fn name(&self) -> &RegionName {
        &self.name
    }

    /// Returns the path of the file that programs map.
    pub fn region(&self) -> PathBuf {
        self.directory.join(self.name.as_str())
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    fn beside(&self, file: &str) -> PathBuf {
        self.directory.join(format!(".{}", self.name)).join(file)
    }

    pub(super) fn table(&self) -> PathBuf {
        self.beside("table")
    }

    pub(super) fn mapped(&self) -> PathBuf {
        self.beside("mapped")
    }

    pub(super) fn watched(&self) -> PathBuf {
        self.beside("watched")
    }

    pub(super) fn extent_map(&self) -> PathBuf {
        self.beside("extent_map")
    }

    pub(super) fn sharers(&self) -> PathBuf {
        self.beside("sharers")
    }

    /// Returns the files that the regions of a group share on this host.
    pub(super) fn group(&self, group: &Group) -> GroupFiles {
        GroupFiles::new(&self.directory, group)
    }

    fn foreign(&self) -> PathBuf {
        self.beside("foreign")
    }

    /// Returns whether the region is another host's.
    pub fn is_foreign(&self) -> bool {
        self.foreign().exists()
    }

    /// Makes the region another host's, or this one's, for all later engines.
    pub(super) fn make_foreign(&self, foreign: bool) -> Result<(), RegionError> {
        let path = self.foreign();
        let made = if foreign {
            File::create(&path).map(drop)
        } else {
            fs::remove_file(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })
        };
        made.map_err(RegionError::io(format!("cannot change {}", path.display())))
    }

    /// Returns the path of the socket for programs.
    pub fn programs(&self) -> PathBuf {
        self.beside("programs")
    }

    pub(super) fn control(&self) -> PathBuf {
        self.beside("control")
    }

    pub(super) fn record(&self) -> PathBuf {
        self.beside(RECORD)
    }

    /// Returns the path of the engines' log.
    pub fn log(&self) -> PathBuf {
        self.beside("log")
    }

    /// Creates all files, for root only. The caller holds the directory ([`regions::ensure`]), so
    /// that a maker that dies leaves only what the next one removes.
    pub(super) fn create(&self, spec: &RegionSpec) -> Result<(), RegionError> {
        let fail = |path: &Path| RegionError::io(format!("cannot create {}", path.display()));
        let beside = self.beside("");
        let making = self.directory.join(format!("{UNFINISHED}{}", self.name));
        if beside.exists() {
            return Err(RegionError::Exists(self.name.clone()));
        }
        let made = fs::DirBuilder::new().mode(0o700).create(&making).map_err(fail(&making));
        let made = made
            .and_then(|()| fill(&making, spec))
            .and_then(|()| fs::rename(&making, &beside).map_err(fail(&beside)))
            .and_then(|()| create_sized(&self.region(), spec.size.0));
        if made.is_err() {
            let _ = fs::remove_dir_all(&making);
            self.remove();
        }
        made
    }

    /// Replaces the record.
    pub(super) fn write(&self, spec: &RegionSpec) -> Result<(), RegionError> {
        write_record(&self.record(), spec)
    }

    pub(super) fn read(&self) -> Result<RegionSpec, RegionError> {
        let path = self.record();
        let read = record::read(&path)
            .map_err(RegionError::io(format!("cannot read {}", path.display())))?;
        read.ok_or_else(|| RegionError::Unknown(self.name.clone()))
    }

    /// Makes this process the region's supervisor, while it holds the returned file.
    ///
    /// # Errors
    /// Another process is the supervisor, or the lock file cannot be used.
    pub(super) fn become_supervisor(&self) -> Result<File, RegionError> {
        let path = self.beside("kept");
        let fail = || RegionError::io(format!("cannot lock {}", path.display()));
        let kept =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let kept = kept.map_err(fail())?;
        match kept.try_lock() {
            Ok(()) => Ok(kept),
            Err(TryLockError::WouldBlock) => {
                Err(RegionError::Misuse(format!("region '{}' is served already", self.name)))
            }
            Err(TryLockError::Error(error)) => Err(fail()(error)),
        }
    }

    /// Returns whether an engine has the region.
    pub(super) fn is_served(&self) -> bool {
        Self::open(&self.table())
            .is_ok_and(|table| matches!(table.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    pub(super) fn open(path: &Path) -> Result<File, RegionError> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        file.map_err(RegionError::io(format!("cannot open {}", path.display())))
    }

    /// Opens a file, and creates it for regions of older releases that lack it.
    pub(super) fn open_or_make(path: &Path) -> Result<File, RegionError> {
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        file.map_err(RegionError::io(format!("cannot open {}", path.display())))
    }

    /// Removes all files.
    pub(super) fn remove(&self) {
        // An absent file needs no removal.
        let _ = fs::remove_file(self.region());
        if let Ok(spec) = self.read() {
            spec.spill.into_iter().for_each(|spill| _ = fs::remove_file(spill.path));
            let leases = spec.leases.iter().map(|target| target.lease);
            spec.disk.iter().for_each(|disk| disk.remove_files(leases.clone()));
        }
        // An engine that ends may be about to record the end of a program.
        for _ in 0..100 {
            let _ = fs::remove_dir_all(self.beside(""));
            if !self.beside("").exists() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Creates the files beside a region, the record last.
fn fill(directory: &Path, spec: &RegionSpec) -> Result<(), RegionError> {
    for (file, size) in [("table", spec.size.pages()), ("extent_map", 0), ("sharers", 0)] {
        create_sized(&directory.join(file), size)?;
    }
    write_record(&directory.join(RECORD), spec)
}

fn create_sized(path: &Path, size: u64) -> Result<(), RegionError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let made = file.and_then(|file| file.set_len(size));
    made.map_err(RegionError::io(format!("cannot create {}", path.display())))
}

fn write_record(path: &Path, spec: &RegionSpec) -> Result<(), RegionError> {
    record::write(path, spec).map_err(RegionError::io(format!("cannot write {}", path.display())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;
    use crate::LinkSpec;

    #[test]
    fn a_record_is_flat_and_refused_with_a_field_that_is_unknown() {
        let link = LinkSpec { latency: Duration::from_micros(5), one_at_a_time: true };
        let timeout = Some(Duration::from_millis(1500));
        let paging = Paging { link: Some(link), fault_timeout: timeout, ..Paging::default() };
        let spec = RegionSpec::new("one".parse().unwrap(), Bytes::mib(64), Bytes::mib(1));
        let spec = RegionSpec { paging, ..spec };
        let mut record = serde_json::to_value(&spec).unwrap();
        assert_eq!((&record["workers"], &record["scheme"]), (&2.into(), &"pre-evict".into()));
        assert_eq!(serde_json::from_value::<RegionSpec>(record.clone()).unwrap(), spec);
        record["workres"] = 2.into();
        let refused = serde_json::from_value::<RegionSpec>(record).unwrap_err().to_string();
        assert!(refused.contains("workres"), "{refused}");
    }
}
