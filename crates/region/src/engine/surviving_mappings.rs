//! The programs that an earlier engine served. Until they have reattached or ended, they may write
//! to their mapped pages without this engine's knowledge. So none of those pages may leave.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aquifer_page::{PAGE_SIZE, file};
use aquifer_procfs::process::{self, Mapping, mappings};
use aquifer_region_client::Run;
use serde::{Deserialize, Serialize};

use crate::program;

/// A mapping of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mapped {
    pid: u32,
    /// The start time of the program, in clock ticks since boot, as another process may reuse its
    /// id.
    started: u64,
    address: u64,
    /// The mapped pages. `None` if an older release wrote the record; any page may be mapped then.
    #[serde(default)]
    pages: Option<Run>,
    /// Whether its faults come to an engine. If not, its page table and the file may get pages at
    /// any time.
    #[serde(default = "watched")]
    watched: bool,
}

fn watched() -> bool {
    true
}

/// All mappings, in a file that outlives the engine.
#[derive(Debug)]
pub(super) struct SurvivingMappings {
    path: PathBuf,
    /// The files that a program maps: the region, and the group's frames.
    files: [PathBuf; 2],
    here: Vec<Mapped>,
    missing: Vec<Mapped>,
}

impl Mapped {
    pub(super) fn new(pid: u32, address: u64, pages: Run, watched: bool) -> io::Result<Self> {
        let started = process::started(pid).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { pid, started, address, pages: Some(pages), watched })
    }

    /// Returns whether both are one mapping of a program. An older release's record has no pages.
    fn is_same(&self, other: &Self) -> bool {
        (self.pid, self.started, self.address) == (other.pid, other.started, other.address)
    }

    fn addresses(&self) -> Range<u64> {
        let length = self.pages.map(|pages| pages.count.saturating_mul(PAGE_SIZE as u64));
        self.address..self.address.saturating_add(length.unwrap_or(u64::MAX))
    }

    /// Returns whether the program still has a part of one of the files mapped there.
    fn is_there(&self, files: &[PathBuf; 2]) -> bool {
        let identity = |file: &PathBuf| fs::metadata(file).map(|data| (data.dev(), data.ino()));
        let files: Vec<_> = files.iter().filter_map(|file| identity(file).ok()).collect();
        let maps = process::read(self.pid, "maps").unwrap_or_default();
        let is_part = |Mapping { addresses: at, file }: Mapping| {
            let all = self.addresses();
            at.start < all.end && all.start < at.end && files.contains(&file)
        };
        process::started(self.pid) == Some(self.started) && mappings(&maps).any(is_part)
    }

    /// Adds those of the pages that are in the program's page table. Returns `None` if they are
    /// unknown.
    fn add_present(&self, pages: &Range<u64>, into: &mut HashSet<u64>) -> Option<()> {
        let all = self.pages?;
        let at = |page: u64| {
            self.address + (page.clamp(all.first, all.end()) - all.first) * PAGE_SIZE as u64
        };
        let page = |address: u64| all.first + (address - self.address) / PAGE_SIZE as u64;
        let pagemap = File::open(format!("/proc/{}/pagemap", self.pid)).ok()?;
        let found = |found: Range<u64>| into.extend(page(found.start)..page(found.end));
        program::each_present(&pagemap, at(pages.start)..at(pages.end), found).ok()
    }

    fn name(&self) -> String {
        format!("{} (process {}, not reattached)", process::name(self.pid), self.pid)
    }
}

/// Returns the names of the programs that wait for an engine of the region. `mapped` is the
/// region's record of mappings, and `files` are the files that programs map.
///
/// # Errors
/// The system's.
pub fn waiting_programs(mapped: &Path, files: [PathBuf; 2]) -> io::Result<Vec<String>> {
    let mut surviving_mappings = SurvivingMappings::open(mapped.to_owned(), files)?;
    surviving_mappings.look();
    Ok(surviving_mappings.missing_names())
}

impl SurvivingMappings {
    /// Reads the mappings that the earlier engine left. `files` are the region and the group's
    /// frames.
    pub(super) fn open(path: PathBuf, files: [PathBuf; 2]) -> io::Result<Self> {
        let missing = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => serde_json::from_slice(&read?)?,
        };
        Ok(Self { path, files, here: Vec::new(), missing })
    }

    /// Returns the number of programs that should reattach.
    pub(super) fn missing(&self) -> usize {
        self.missing.len()
    }

    /// Forgets the programs that will not reattach. Returns whether there were any.
    pub(super) fn look(&mut self) -> bool {
        let (files, before) = (&self.files, self.missing.len());
        self.missing.retain(|mapped| mapped.is_there(files));
        self.missing.len() < before
    }

    /// Returns whether a program that should reattach may get pages from the kernel alone.
    pub(super) fn has_unwatched(&self) -> bool {
        self.missing.iter().any(|mapped| !mapped.watched)
    }

    /// Returns whether an earlier engine served the faults of a program.
    pub(super) fn has_watched(&self) -> bool {
        self.missing.iter().any(|mapped| mapped.watched)
    }

    /// Returns the names of the programs that should reattach.
    pub(super) fn missing_names(&self) -> Vec<String> {
        self.missing.iter().map(Mapped::name).collect()
    }

    /// Returns whether the program still has this mapping.
    pub(super) fn is_there(&self, mapped: &Mapped) -> bool {
        mapped.is_there(&self.files)
    }

    /// Adds those of the pages that missing programs have in their page tables. Returns false if
    /// that is unknown.
    pub(super) fn add_present(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> bool {
        let mut known =
            |mapped: &Mapped| runs.iter().all(|run| mapped.add_present(run, into).is_some());
        self.missing.iter().all(&mut known)
    }

    pub(super) fn add(&mut self, mapped: Mapped) -> io::Result<()> {
        self.missing.retain(|other| !other.is_same(&mapped));
        self.leaves(&mapped);
        self.here.push(mapped);
        self.write()
    }

    /// Records that the faults of a mapping come to the engine.
    pub(super) fn is_watched(&mut self, pid: u32, address: u64) -> io::Result<()> {
        for mapped in self.here.iter_mut().filter(|it| (it.pid, it.address) == (pid, address)) {
            mapped.watched = true;
        }
        self.write()
    }

    /// Records that the mapping is not served now, and will come back or end.
    pub(super) fn is_away(&mut self, mapped: Mapped) {
        self.leaves(&mapped);
        if !self.missing.iter().chain(&self.here).any(|other| other.is_same(&mapped)) {
            self.missing.push(mapped);
        }
        // On failure the record still lists the mapping, which the next engine looks for in vain.
        let _ = self.write();
    }

    pub(super) fn remove(&mut self, mapped: &Mapped) {
        self.leaves(mapped);
        // On failure the record still lists the mapping, which the next engine looks for in vain.
        let _ = self.write();
    }

    fn leaves(&mut self, mapped: &Mapped) {
        self.here.retain(|other| !other.is_same(mapped));
    }

    fn write(&self) -> io::Result<()> {
        let all: Vec<_> = self.here.iter().chain(&self.missing).collect();
        file::replace(&self.path, &serde_json::to_vec(&all)?)
    }
}
