use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, Group, RegionName, VolumeId};
use aquifer_pool::{LeaseTarget, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::{record, regions};
use crate::engine::{LinkSpec, Scheme};
use crate::error::RegionError;
use crate::frames;
use crate::policy::PolicyKind;
use crate::prefetch::PrefetchKind;

/// What a region is made with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionSpec {
    /// Its name, and that of its file.
    pub name: RegionName,
    /// Its size: whole pages.
    pub size: Bytes,
    /// How much of it may be in the local cache.
    pub cache: Bytes,
    /// Its tenant: a limit can be over all caches of a group.
    pub group: Group,
    /// Which pages leave.
    pub policy: PolicyKind,
    /// When they do.
    pub scheme: Scheme,
    /// What is fetched before it is touched.
    pub prefetch: PrefetchKind,
    /// A link to be emulated.
    pub link: Option<LinkSpec>,
    /// How long a program waits for a page that cannot be fetched, before it gets `SIGBUS`; for ever if nothing is said.
    pub give_up: Option<Duration>,
    /// Faults that are served at a time.
    pub workers: usize,
    /// Its volume's id.
    pub volume: VolumeId,
    /// Where its pages go.
    pub leases: Vec<LeaseTarget>,
    /// How long a fetch waits for an unreachable lender before it is tried anew.
    pub patience: Duration,
    /// Directory of the host's certificate, for leases over TLS.
    pub identity: Option<PathBuf>,
}

impl RegionSpec {
    /// The same for people's eyes, and for logs: without the keys of sealed leases.
    #[must_use]
    pub fn without_keys(mut self) -> Self {
        self.leases.iter_mut().for_each(|lease| lease.seal = None);
        self
    }

    /// Workers unless told otherwise.
    pub const DEFAULT_WORKERS: usize = 2;

    /// A region that nobody lends to yet, and of which all else is as usual.
    pub fn new(name: RegionName, size: Bytes, cache: Bytes) -> Self {
        Self {
            name,
            size,
            cache,
            group: Group::default(),
            policy: PolicyKind::default(),
            scheme: Scheme::default(),
            prefetch: PrefetchKind::default(),
            link: None,
            give_up: None,
            workers: Self::DEFAULT_WORKERS,
            volume: VolumeId::random(),
            leases: Vec::new(),
            patience: VolumeConfig::DEFAULT_PATIENCE,
            identity: None,
        }
    }
}

/// The files of what the regions of a group have in common on a host.
#[derive(Clone, Debug)]
pub struct GroupFiles {
    directory: PathBuf,
}

impl GroupFiles {
    /// Of the group, whose regions are in `directory`. (No region has such a name.)
    pub fn new(directory: &Path, group: &Group) -> Self {
        Self { directory: directory.join(format!("@{group}")) }
    }

    /// Where they are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Pages that are kept once.
    pub fn frames(&self) -> PathBuf {
        self.directory.join("frames")
    }

    /// What is locked by who gives frames back, for as long as that takes: no page comes to be shared meanwhile.
    pub fn giving(&self) -> PathBuf {
        frames::giving(&self.frames())
    }

    /// Who pays for looking for equal pages of the group, if not the group itself.
    pub fn payer(&self) -> PathBuf {
        self.directory.join("payer")
    }

    /// The socket at which the cache of the group's disks serves them, by NBD.
    pub fn cache_disks(&self) -> PathBuf {
        self.directory.join("cache.nbd")
    }

    /// The socket at which that cache is asked how it is, and told what it may have.
    pub fn cache_control(&self) -> PathBuf {
        self.directory.join("cache.control")
    }

    /// What is locked by who serves that cache.
    pub fn cache_lock(&self) -> PathBuf {
        self.directory.join("cache.lock")
    }

    /// Makes the directory, where regions are to be: there need not be any yet.
    ///
    /// # Errors
    /// [`RegionError::Io`].
    pub fn create(&self) -> Result<(), RegionError> {
        let regions = self.directory.parent().unwrap_or(Path::new("/"));
        let made = regions::ensure(regions).and_then(|_held| {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
        });
        made.map_err(RegionError::io(format!(
            "cannot make {} (it takes root)",
            self.directory.display()
        )))
    }

    /// Takes away what is not in use: the directory if nothing is in it, and then what regions are on if there are none.
    pub fn release(&self) {
        // It stays if something is in it.
        let _ = fs::remove_dir(&self.directory);
        if let Some(regions) = self.directory.parent() {
            regions::release_soon(regions);
        }
    }
}

/// The files of a region.
#[derive(Clone, Debug)]
pub struct Files {
    directory: PathBuf,
    name: RegionName,
}

impl Files {
    /// Of the region `name`, whose file is to be in `directory`.
    pub fn new(directory: &Path, name: &RegionName) -> Self {
        Self { directory: directory.to_owned(), name: name.clone() }
    }

    /// Those of all regions in a directory.
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

    /// Whether there is such a region. Where this user may not know, its record says so when it is read.
    fn may_exist(&self) -> bool {
        self.record().try_exists().unwrap_or(true)
    }

    /// Where all that runs has its files, if regions are where they are by default: in a directory of that.
    pub fn run_dir(&self) -> Option<&Path> {
        self.directory.parent()
    }

    /// The region's name.
    pub fn name(&self) -> &RegionName {
        &self.name
    }

    /// What programs map.
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

    pub(super) fn places(&self) -> PathBuf {
        self.beside("places")
    }

    pub(super) fn sharers(&self) -> PathBuf {
        self.beside("sharers")
    }

    /// What the regions of a group have in common on this host.
    pub(super) fn group(&self, group: &Group) -> GroupFiles {
        GroupFiles::new(&self.directory, group)
    }

    fn foreign(&self) -> PathBuf {
        self.beside("foreign")
    }

    /// Whether the region is another host's.
    pub(super) fn is_foreign(&self) -> bool {
        self.foreign().exists()
    }

    /// Makes it another host's, or this one's, for all engines to come.
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

    /// The socket for programs.
    pub fn programs(&self) -> PathBuf {
        self.beside("programs")
    }

    pub(super) fn control(&self) -> PathBuf {
        self.beside("control")
    }

    pub(super) fn record(&self) -> PathBuf {
        self.beside("record.json")
    }

    /// What the engines have to say.
    pub fn log(&self) -> PathBuf {
        self.beside("log")
    }

    /// Makes all of them, for root only.
    pub(super) fn create(&self, spec: &RegionSpec) -> Result<(), RegionError> {
        let fail = |path: &Path| RegionError::io(format!("cannot make {}", path.display()));
        let beside = self.beside("");
        match fs::DirBuilder::new().mode(0o700).create(&beside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(RegionError::Exists(self.name.clone()));
            }
            made => made.map_err(fail(&beside))?,
        }
        let made = self.fill(spec);
        if made.is_err() {
            self.remove();
        }
        made
    }

    fn fill(&self, spec: &RegionSpec) -> Result<(), RegionError> {
        let fail = |path: &Path| RegionError::io(format!("cannot make {}", path.display()));
        let sizes = [
            (self.region(), spec.size.0),
            (self.table(), spec.size.pages()),
            (self.places(), 0),
            (self.sharers(), 0),
        ];
        for (path, size) in sizes {
            let mut options = OpenOptions::new();
            let file = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
                .map_err(fail(&path))?;
            file.set_len(size).map_err(fail(&path))?;
        }
        self.write(spec)
    }

    /// Writes the record anew.
    pub(super) fn write(&self, spec: &RegionSpec) -> Result<(), RegionError> {
        let path = self.record();
        record::write(&path, spec)
            .map_err(RegionError::io(format!("cannot write {}", path.display())))
    }

    pub(super) fn read(&self) -> Result<RegionSpec, RegionError> {
        let path = self.record();
        let read = record::read(&path)
            .map_err(RegionError::io(format!("cannot read {}", path.display())))?;
        read.ok_or_else(|| RegionError::Unknown(self.name.clone()))
    }

    /// Has this process be its keeper, for as long as it holds what it gets.
    pub(super) fn keep(&self) -> Result<File, RegionError> {
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

    /// Whether an engine has it.
    pub(super) fn is_served(&self) -> bool {
        Self::open(&self.table())
            .is_ok_and(|table| matches!(table.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    pub(super) fn open(path: &Path) -> Result<File, RegionError> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        file.map_err(RegionError::io(format!("cannot open {}", path.display())))
    }

    /// The same for a file that regions of older releases do not have.
    pub(super) fn open_or_make(path: &Path) -> Result<File, RegionError> {
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        file.map_err(RegionError::io(format!("cannot open {}", path.display())))
    }

    /// Removes them.
    pub(super) fn remove(&self) {
        // What is not there needs no removing.
        let _ = fs::remove_file(self.region());
        // An engine that ends may be about to note that a program is gone.
        for _ in 0..100 {
            let _ = fs::remove_dir_all(self.beside(""));
            if !self.beside("").exists() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
