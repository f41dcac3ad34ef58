//! The start of an engine on a region's files, and its end.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use aquifer_page::{EXTENT_SIZE, PAGE_SIZE, WorkerId};
use aquifer_volume::{
    DiskCopies, LeaseTarget, SecondCopy, SpillFile, Upkeep, Volume, VolumeConfig,
};

use super::cache::{Cache, Signals};
use super::fault::Faults;
use super::lenders::{Lenders, log, volume_workers};
use super::link::Link;
use super::prefetch::Early;
use super::programs::Programs;
use super::sharing::GroupPages;
use super::surviving_mappings::SurvivingMappings;
use super::watching::{Is, Watching};
use super::{Engine, EngineConfig, Phase};
use crate::counters::Counters;
use crate::error::RegionError;
use crate::extent_map::ExtentMap;
use crate::file::RegionFile;
use crate::frames::{Frames, Sharers};
use crate::lock;
use crate::table::Table;

impl Engine {
    /// Opens the region in the file `region`. Continues from an earlier engine's `table`,
    /// `extent_map`, `sharers` and `programs`, if there was one. `frames` is the file of the
    /// group's frames. The file `watched` says whether an engine serves the programs' faults.
    ///
    /// # Errors
    /// The files cannot be used. For the region's first engine, also if a lease cannot be reached.
    pub fn open(
        config: &EngineConfig,
        volume: VolumeConfig,
        leases: &[LeaseTarget],
        [region, table, extent_map, sharers]: [(&Path, File); 4],
        [programs, frames, watched]: [PathBuf; 3],
    ) -> Result<Self, RegionError> {
        let joined = |volume: VolumeConfig, resumes| {
            let volume = Volume::new(volume)?;
            for lease in leases.iter().cloned() {
                // A later engine starts without its lenders, so that programs reach the pages that
                // are here.
                if resumes { volume.resume_lease(lease)? } else { volume.add_lease(lease)? }
            }
            Ok(volume)
        };
        let files = [region, table, extent_map, sharers];
        Self::over(config, volume, joined, files, [programs, frames, watched])
    }

    /// Opens the region over a volume to which `joined` adds the leases. Its second argument says
    /// whether an earlier engine found them usable.
    pub(super) fn over(
        config: &EngineConfig,
        volume: VolumeConfig,
        joined: impl FnOnce(VolumeConfig, bool) -> Result<Volume, RegionError>,
        [region, table, extent_map, sharers]: [(&Path, File); 4],
        [programs, frames, watched]: [PathBuf; 3],
    ) -> Result<Self, RegionError> {
        let fail = |path: &Path| RegionError::io(format!("cannot map {}", path.display()));
        let file = RegionFile::new(region.1).map_err(fail(region.0))?;
        let pages = file.pages();
        let extents = (pages * PAGE_SIZE as u64).div_ceil(EXTENT_SIZE);
        let table = Table::new(&table.1, pages).map_err(fail(table.0))?;
        let (path, map) = extent_map;
        let extent_map = Arc::new(ExtentMap::new(path, &map, extents).map_err(fail(path))?);
        let sharers = Sharers::new(&sharers.1, pages).map_err(fail(sharers.0))?;
        // Besides the fault workers, one thread evicts and one discards.
        let workers = volume_workers(config.paging.workers);
        let fail = RegionError::io(format!("cannot read {}", programs.display()));
        let mapped = [region.0.to_owned(), frames.clone()];
        let surviving_mappings = SurvivingMappings::open(programs, mapped).map_err(fail)?;
        let resumes = extent_map.all().next().is_some()
            || !table.is_new()
            || surviving_mappings.missing() > 0;
        let volume =
            joined(VolumeConfig { workers, ledger: Some(extent_map.clone()), ..volume }, resumes)?;
        if let Some(spill) = &config.spill {
            open_spill(&volume, spill, &extent_map);
        }
        add_copies(&volume, &config.copies, resumes)?;
        if let Some(disk) = config.disk.as_ref().filter(|_| !config.foreign) {
            keep_disk_copies(&volume, disk, resumes)?;
        }
        let volume_copies = volume.copies();
        let spill = config.spill.iter().map(|spill| spill.lease);
        let leases = volume.targets().into_iter().map(|target| target.lease).chain(spill);
        let copies = config.copies.iter().chain(&volume_copies).map(|copy| copy.lease.lease);
        let on_disk = |target: LeaseTarget| DiskCopies::tags_of(target.lease);
        let on_disk = config.disk.iter().flat_map(|_| volume.targets()).map(on_disk);
        let leases = leases.chain(copies).chain(on_disk);
        let fail = RegionError::io("cannot remove the tags of earlier leases");
        extent_map.keep_tags(leases).map_err(fail)?;
        if resumes && !config.foreign {
            // The earlier engine may have been killed before it told the lenders.
            volume.end_older_generations();
        }
        let is_new = config.cache.0 >= pages * PAGE_SIZE as u64
            && table.is_new()
            && extent_map.all().next().is_none()
            && !surviving_mappings.has_watched();
        let always = !config.may_be_unwatched || config.foreign;
        let fail = RegionError::io(format!("cannot write {}", watched.display()));
        let watching = Watching::open(watched, always, is_new).map_err(fail)?;
        // The table knows nothing of pages that programs got from the kernel.
        let unwatched = *watching.hold() == Is::Unwatched;
        let volume = Arc::new(volume);
        let engine = Self {
            file,
            table,
            group: GroupPages { sharers, frames: Frames::new(frames), changing: Mutex::default() },
            lenders: Lenders {
                volume,
                extent_map: extent_map.clone(),
                link: config.paging.link.map(Link::new),
                upkeep: Mutex::default(),
                leftovers: Mutex::default(),
            },
            cache: Mutex::new(Cache::new(config, pages)),
            signals: Signals::default(),
            programs: Programs::new(surviving_mappings, config.paging.prefetch),
            faults: Faults::new(config).map_err(RegionError::io("cannot create an epoll"))?,
            early: Early::new(pages),
            counters: Counters::default(),
            watching,
            phase: Phase { ended: AtomicBool::new(false), frozen: AtomicBool::new(config.foreign) },
        };
        if !unwatched {
            engine
                .recover(&extent_map)
                .map_err(RegionError::io(format!("cannot read {}", region.0.display())))?;
        }
        engine.lenders.volume.trim_spill();
        if config.foreign {
            engine.lenders.volume.hold_still();
        }
        Ok(engine)
    }

    /// Starts the threads, which serve until [`end`](Self::end).
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(self: &Arc<Self>) -> io::Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        let engine = Arc::downgrade(self);
        // While the region is another host's, that host's engine reconnects to its lenders.
        let is_ours = move || engine.upgrade().is_some_and(|engine| !engine.is_frozen());
        *lock(&self.lenders.upkeep) =
            Some(Upkeep::start_while(&self.lenders.volume, is_ours, log)?);
        for worker in (0..self.faults.workers).map(WorkerId) {
            let engine = self.clone();
            let body = move || engine.serve_faults(worker);
            threads.push(thread::Builder::new().name(format!("fault-{worker}")).spawn(body)?);
        }
        let engine = self.clone();
        threads.push(
            thread::Builder::new().name("evict".to_owned()).spawn(move || engine.keep_room())?,
        );
        let engine = self.clone();
        threads.push(
            thread::Builder::new()
                .name("retry".to_owned())
                .spawn(move || engine.retry_stalled())?,
        );
        if !lock(&self.lenders.leftovers).is_empty() {
            let engine = self.clone();
            let body = move || engine.discard_leftovers();
            threads.push(thread::Builder::new().name("leftovers".to_owned()).spawn(body)?);
        }
        Ok(threads)
    }

    /// Makes the threads end.
    pub fn end(&self) {
        self.phase.ended.store(true, Ordering::Relaxed);
        *lock(&self.lenders.upkeep) = None;
        // Each condition is signalled under the lock under which its waiters check for the end. A
        // failed write means that the eventfd was already set.
        let _ = rustix::io::write(&self.faults.end, &1_u64.to_ne_bytes());
        self.faults.poll_token.end();
        let cache = lock(&self.cache);
        self.signals.short.notify_all();
        self.signals.watch.notify_all();
        drop(cache);
        let stalled = lock(&self.faults.stalled);
        self.faults.retry.notify_all();
        drop(stalled);
    }
}

/// Adds the second copies of leases' pages. The next engine goes on without one that it cannot use,
/// as the first copy has all pages that programs need.
fn add_copies(volume: &Volume, copies: &[SecondCopy], resumes: bool) -> Result<(), RegionError> {
    for copy in copies.iter().cloned() {
        let of = copy.of;
        if !resumes {
            volume.add_copy(copy, |_| Ok::<_, RegionError>(()))?;
        } else if let Err(error) = volume.resume_copy(copy) {
            tracing::error!("no second copy of lease {of}: {error}");
        }
    }
    Ok(())
}

/// Keeps copies on this host's disk. The next engine goes on without those that it cannot use.
fn keep_disk_copies(volume: &Volume, disk: &DiskCopies, resumes: bool) -> Result<(), RegionError> {
    match volume.keep_disk_copies(disk, resumes) {
        Err(error) if resumes => tracing::error!("{error}"),
        kept => kept?,
    }
    Ok(())
}

/// Opens the spill file. If that fails, pages elsewhere are served all the same, and the region may
/// get another file if this one holds none of its extents.
fn open_spill(volume: &Volume, spill: &SpillFile, extent_map: &ExtentMap) {
    let Err(error) = volume.add_spill(spill) else { return };
    tracing::error!("{error}");
    if extent_map.all().any(|(_, (lease, _))| lease == spill.lease) {
        volume.add_broken_spill(spill, error.to_string());
    }
}
