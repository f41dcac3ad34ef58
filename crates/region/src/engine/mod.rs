//! The engine of a region. Every page is in one place, and moves between places by these few steps.
//!
//! ```text
//!            fill (fault)                    unmap (victim named)
//!  Zero ───────────────────▶ Resident ───────────────────────────▶ Unmapped
//!  Remote ─────────────────▶    ▲                                   │   │
//!    ▲                          └────────── map (touched again) ────┘   │
//!    └────────────────────────── write back if dirty, take out ─────────┘
//! ```
//!
//! A resident page that is equal to others of the group also leaves the file, but stays mapped,
//! from a frame of the group. Its place is `Shared` ([`sharing`]).
//!
//! A page on its way is `Filling` or `Leaving`. The thread that moves it holds no lock meanwhile.
//! All other threads leave the page alone, and a fault on it waits. The table changes only under
//! the cache's lock. It is in shared memory, and at every moment holds enough for another engine to
//! continue ([`recover`]).

#[cfg(test)]
mod crash;
mod dirty;
mod discard;
mod evict;
mod fault;
mod incoming;
mod link;
mod outgoing;
mod persist;
mod postcopy;
mod prefetch;
mod programs;
mod recover;
mod sharing;
mod surviving_mappings;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, PAGE_SIZE};
use aquifer_transport::poll_token::PollToken;
use aquifer_transport::sleep::going_to_sleep;
use aquifer_volume::{Event, Happening, LeaseTarget, Upkeep, Volume, VolumeConfig};
use rustix::event::epoll;
use serde::{Deserialize, Serialize};

use crate::counters::{Counters, Counts, Times};
use crate::error::RegionError;
use crate::extent_map::ExtentMap;
use crate::file::RegionFile;
use crate::frames::{Frames, Sharers};
use crate::lock;
use crate::policy::{Policy, PolicyKind};
use crate::prefetch::PrefetchKind;
use crate::program::Program;
use crate::table::{Place, Table};
pub use incoming::Incoming;
use link::Link;
pub use link::LinkSpec;
use outgoing::Outgoing;
use prefetch::Early;
pub use sharing::{Merged, Proposal};
use surviving_mappings::SurvivingMappings;
pub(crate) use surviving_mappings::waiting_programs;

/// When victims leave the cache (\[Lim12\], section 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// When a page needs the frame.
    OnDemand,
    /// In advance: the engine keeps a few frames free, so that a fetch does not wait for an
    /// eviction.
    #[default]
    PreEvict,
}

/// The configuration of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The limit of the local cache.
    pub cache: Bytes,
    /// The policy that chooses victims.
    pub policy: PolicyKind,
    /// When victims leave.
    pub scheme: Scheme,
    /// The prefetcher.
    pub prefetch: PrefetchKind,
    /// An emulated link, slower than the real one.
    pub link: Option<LinkSpec>,
    /// How long a thread waits for a page that cannot be fetched, before it gets `SIGBUS`. `None`:
    /// no limit.
    pub fault_timeout: Option<Duration>,
    /// How many faults the engine serves at a time.
    pub workers: usize,
    /// The volume belongs to another host's engine. This engine must not write to it, until it owns
    /// the region.
    pub foreign: bool,
}

/// The parts of a region by their place, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The region's size.
    pub size: Bytes,
    /// The local cache's limit.
    pub cache: Bytes,
    /// The part in the local cache.
    pub resident: Bytes,
    /// The part kept once for several regions of the group, outside the local cache.
    #[serde(default)]
    pub shared: Bytes,
    /// The part of `resident` known to differ from the lenders' version. A page that a program has
    /// mapped may be dirty without that being known.
    pub dirty: Bytes,
    /// The part with lenders only.
    pub remote: Bytes,
    /// The part never written, or discarded.
    pub zero: Bytes,
    /// The part still with the source host, and on its way from there.
    pub awaiting_source: Bytes,
}

/// The local cache.
#[derive(Debug)]
struct Cache {
    /// The limit, in frames.
    limit: u64,
    /// The frames in use by pages in the file or on their way into it.
    frames: u64,
    policy: Box<dyn Policy>,
    scheme: Scheme,
    /// The frames allowed beyond the limit for now. Programs that take no orders may hold that
    /// many, and the other programs must still be served.
    beyond: u64,
    /// The thread that keeps frames free is working.
    making_room: bool,
    /// A caller of [`Engine::wait_until_short`] wants to hear of faults that find little room or
    /// none; `is_short` says that there were some.
    watched: bool,
    is_short: bool,
    /// Victims outside the page tables, the oldest first. Pages touched since are still listed.
    cold_list: VecDeque<u64>,
    /// The pages that the destination host has, during a hand-over.
    outgoing: Option<Outgoing>,
    /// Pages that threads wait for and that come from the source host. Pages that came since are
    /// still listed.
    awaiting_source: VecDeque<u64>,
}

/// A fault that could not be served.
#[derive(Clone, Copy, Debug)]
struct Stalled {
    since: Instant,
    /// The fault waits for its retry; false during the retry.
    waits: bool,
}

/// The engine of a region.
#[derive(Debug)]
pub struct Engine {
    file: RegionFile,
    table: Table,
    volume: Arc<Volume>,
    /// The thread that reconnects to lost lenders, while this engine runs.
    upkeep: Mutex<Option<Upkeep>>,
    workers: usize,
    prefetch: PrefetchKind,
    early: Early,
    link: Option<Link>,
    fault_timeout: Option<Duration>,
    cache: Mutex<Cache>,
    /// Signalled when a frame becomes free or a page arrives.
    fill_done: Condvar,
    /// Signalled when free frames fall below the reserve.
    short: Condvar,
    /// Signalled when a watched fault finds little room or none.
    watch: Condvar,
    programs: RwLock<Vec<Arc<Program>>>,
    surviving_mappings: Mutex<SurvivingMappings>,
    /// The region is being removed, so no program may attach. Read under the lock of the programs.
    removing: AtomicBool,
    /// How often programs have unmapped pages. Only their page tables knew of writes to these
    /// pages.
    released: AtomicU64,
    next_program: AtomicU64,
    /// The epoll of the programs' userfaultfds, and the eventfd that ends the wait.
    faults: OwnedFd,
    end: OwnedFd,
    /// Lets one worker at a time wait for faults. A fault that a lender answers at once needs no
    /// other thread.
    poll_token: Arc<PollToken>,
    /// Faults that could not be served, by program and page.
    stalled: Mutex<HashMap<(u64, u64), Stalled>>,
    /// Signalled when a stalled fault is to be retried.
    retry: Condvar,
    /// A fetch or a write has failed, and the log says so.
    trouble: AtomicBool,
    fetching: AtomicUsize,
    counters: Counters,
    ended: AtomicBool,
    /// No page may leave, and no write may reach the volume, as the region is handed over or
    /// another host's.
    frozen: AtomicBool,
    /// The frame of the group behind each shared page.
    sharers: Sharers,
    frames: Frames,
    /// Held by a request that shares or unshares pages; a fault does not take it.
    sharing: Mutex<()>,
    /// Held during a scan for dirty pages, as a scan clears the marks that the next one would find.
    looking: Mutex<()>,
    /// Pages that an earlier engine was about to discard, and that lenders may still have.
    leftovers: Mutex<Vec<Range<u64>>>,
    /// The places of the volume's extents, kept for the next engine.
    extent_map: Arc<ExtentMap>,
}

impl Engine {
    /// Opens the region in the file `region`. Continues from an earlier engine's `table`,
    /// `extent_map`, `sharers` and `programs`, if there was one. `frames` is the file of the
    /// group's frames.
    ///
    /// # Errors
    /// The files cannot be used. For the region's first engine, also if a lease cannot be reached.
    pub fn open(
        config: &EngineConfig,
        volume: VolumeConfig,
        leases: &[LeaseTarget],
        [region, table, extent_map, sharers]: [(&Path, File); 4],
        [programs, frames]: [PathBuf; 2],
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
        Self::over(config, volume, joined, [region, table, extent_map, sharers], [programs, frames])
    }

    /// Opens the region over a volume to which `joined` adds the leases. Its second argument says
    /// whether an earlier engine found them usable.
    fn over(
        config: &EngineConfig,
        volume: VolumeConfig,
        joined: impl FnOnce(VolumeConfig, bool) -> Result<Volume, RegionError>,
        [region, table, extent_map, sharers]: [(&Path, File); 4],
        [programs, frames]: [PathBuf; 2],
    ) -> Result<Self, RegionError> {
        let fail = |path: &Path| RegionError::io(format!("cannot map {}", path.display()));
        let file = RegionFile::new(region.1).map_err(fail(region.0))?;
        let pages = file.pages();
        let extents = (pages * PAGE_SIZE as u64).div_ceil(EXTENT_SIZE);
        let table = Table::new(&table.1, pages).map_err(fail(table.0))?;
        let extent_map =
            Arc::new(ExtentMap::new(&extent_map.1, extents).map_err(fail(extent_map.0))?);
        let sharers = Sharers::new(&sharers.1, pages).map_err(fail(sharers.0))?;
        // Besides the fault workers, one thread evicts and one discards.
        let workers = volume_workers(config.workers);
        let fail = RegionError::io(format!("cannot read {}", programs.display()));
        let mapped = [region.0.to_owned(), frames.clone()];
        let surviving_mappings = SurvivingMappings::open(programs, mapped).map_err(fail)?;
        let resumes = extent_map.all().next().is_some()
            || !table.is_new()
            || surviving_mappings.missing() > 0;
        let volume =
            joined(VolumeConfig { workers, ledger: Some(extent_map.clone()), ..volume }, resumes)?;
        if resumes && !config.foreign {
            // The earlier engine may have been killed before it told the lenders.
            volume.end_older_generations();
        }
        let volume = Arc::new(volume);
        let surviving_mappings = Mutex::new(surviving_mappings);
        let (faults, end) = events().map_err(RegionError::io("cannot create an epoll"))?;
        let cache = Cache {
            limit: (config.cache.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES),
            frames: 0,
            policy: config.policy.make(pages),
            scheme: config.scheme,
            beyond: 0,
            making_room: false,
            watched: false,
            is_short: false,
            cold_list: VecDeque::new(),
            outgoing: None,
            awaiting_source: VecDeque::new(),
        };
        let engine = Self {
            file,
            table,
            volume,
            upkeep: Mutex::default(),
            workers: config.workers,
            prefetch: config.prefetch,
            early: Early::new(pages),
            link: config.link.map(Link::new),
            fault_timeout: config.fault_timeout,
            cache: Mutex::new(cache),
            fill_done: Condvar::new(),
            short: Condvar::new(),
            watch: Condvar::new(),
            programs: RwLock::default(),
            surviving_mappings,
            removing: AtomicBool::new(false),
            released: AtomicU64::new(0),
            next_program: AtomicU64::new(0),
            faults,
            end,
            poll_token: Arc::default(),
            stalled: Mutex::default(),
            retry: Condvar::new(),
            trouble: AtomicBool::new(false),
            fetching: AtomicUsize::new(0),
            counters: Counters::default(),
            ended: AtomicBool::new(false),
            frozen: AtomicBool::new(config.foreign),
            sharers,
            frames: Frames::new(frames),
            sharing: Mutex::default(),
            looking: Mutex::default(),
            leftovers: Mutex::default(),
            extent_map: extent_map.clone(),
        };
        engine
            .recover(&extent_map)
            .map_err(RegionError::io(format!("cannot read {}", region.0.display())))?;
        Ok(engine)
    }

    /// The smallest cache, in frames. Every processor must find some pages there at a time to make
    /// progress.
    pub const LEAST_FRAMES: u64 = 64;

    /// Starts the threads, which serve until [`end`](Self::end).
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(self: &Arc<Self>) -> io::Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        let engine = Arc::downgrade(self);
        // While the region is another host's, that host's engine reconnects to its lenders.
        let is_ours = move || engine.upgrade().is_some_and(|engine| !engine.is_frozen());
        *lock(&self.upkeep) = Some(Upkeep::start_while(&self.volume, is_ours, log)?);
        for worker in 0..self.workers {
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
        if !lock(&self.leftovers).is_empty() {
            let engine = self.clone();
            let body = move || engine.discard_leftovers();
            threads.push(thread::Builder::new().name("leftovers".to_owned()).spawn(body)?);
        }
        Ok(threads)
    }

    /// Makes the threads end.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        *lock(&self.upkeep) = None;
        // Each condition is signalled under the lock under which its waiters check for the end. A
        // failed write means that the eventfd was already set.
        let _ = rustix::io::write(&self.end, &1_u64.to_ne_bytes());
        self.poll_token.end();
        let cache = lock(&self.cache);
        self.short.notify_all();
        self.watch.notify_all();
        drop(cache);
        let stalled = lock(&self.stalled);
        self.retry.notify_all();
        drop(stalled);
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// Refuses a change during a hand-over, or while the region is another host's.
    fn may_change(&self) -> Result<(), RegionError> {
        if self.is_frozen() {
            return Err(RegionError::Misuse(
                "the region is being handed over to another host".to_owned(),
            ));
        }
        Ok(())
    }

    /// Returns the region's volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Returns the counts since the engine started.
    pub fn counts(&self) -> Counts {
        self.counters.counts()
    }

    /// Returns the times of remote faults.
    pub fn times(&self) -> Times {
        self.counters.times()
    }

    /// Returns the times of fetches over the emulated link, if there is one.
    pub fn link_times(&self) -> Option<Times> {
        self.link.as_ref().map(Link::took)
    }

    /// Returns the number of stalled faults, and of faults with a fetch in flight.
    pub fn waiting(&self) -> [usize; 2] {
        [lock(&self.stalled).len(), self.fetching.load(Ordering::Relaxed)]
    }

    /// Returns the parts of the region by their place.
    pub fn usage(&self) -> Usage {
        let mut pages = [0; 6];
        for page in 0..self.table.pages() {
            let is = self.table.get(page);
            match is.place {
                Place::Zero | Place::Remote if is.awaiting_source => pages[4] += 1,
                Place::Zero | Place::Lost => pages[0] += 1,
                Place::Remote => pages[1] += 1,
                Place::Shared => pages[5] += 1,
                _ => {
                    pages[2] += 1;
                    pages[3] += u64::from(is.dirty);
                }
            }
        }
        let bytes = |pages| Bytes(pages * PAGE_SIZE as u64);
        let (limit, frames) = {
            let cache = lock(&self.cache);
            (cache.limit, cache.frames)
        };
        // Pages move during the count, so a page that left and its successor may both count. The
        // number of frames bounds the pages that are here.
        let extra = pages[2].saturating_sub(frames);
        pages[2] -= extra;
        pages[3] = pages[3].min(pages[2]);
        pages[1] += extra;
        let [zero, remote, resident, dirty, awaiting_source, shared] = pages.map(bytes);
        let (size, cache) = (bytes(self.table.pages()), bytes(limit));
        Usage { size, cache, resident, shared, dirty, remote, zero, awaiting_source }
    }

    /// Changes the limit of the local cache, and waits until the cache is within it.
    ///
    /// # Errors
    /// Pages cannot leave; the error names the reason. The new limit stays in force.
    pub fn resize_cache(&self, limit: Bytes) -> Result<(), RegionError> {
        self.may_change()?;
        self.limit_cache(limit);
        let (mut least, mut since) = (u64::MAX, Instant::now());
        loop {
            let frames = {
                let cache = lock(&self.cache);
                if cache.frames <= cache.limit {
                    return Ok(());
                }
                cache.frames
            };
            if frames < least {
                (least, since) = (frames, Instant::now());
            } else if since.elapsed() > STUCK {
                let over = Bytes(frames.saturating_sub(self.cache().pages()) * PAGE_SIZE as u64);
                let why = if self.is_complete() {
                    "all other pages are being written or fetched".to_owned()
                } else {
                    self.describe_wait()
                };
                return Err(RegionError::Refused(format!(
                    "the engine cannot evict {over} above the cache limit: {why}"
                )));
            }
            self.evict(self.control_worker(), evict::BATCH)?;
        }
    }

    /// Changes the limit of the local cache. Pages over it leave with later faults.
    pub fn limit_cache(&self, limit: Bytes) {
        let mut cache = lock(&self.cache);
        cache.limit = (limit.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES);
        cache.beyond = 0;
    }

    /// Returns the limit of the local cache.
    pub fn cache(&self) -> Bytes {
        Bytes(lock(&self.cache).limit * PAGE_SIZE as u64)
    }

    /// Sets whether [`wait_until_short`](Self::wait_until_short) hears of faults.
    pub fn watch_room(&self, watched: bool) {
        lock(&self.cache).watched = watched;
    }

    /// Waits for a fault that finds little room or none. Returns false once the engine has ended.
    pub fn wait_until_short(&self) -> bool {
        let mut cache = lock(&self.cache);
        cache.is_short = false;
        let enough = |cache: &mut Cache| !cache.is_short && !self.has_ended();
        drop(self.watch.wait_while(cache, enough).unwrap_or_else(PoisonError::into_inner));
        !self.has_ended()
    }

    /// Returns how many pages have come into the cache.
    pub fn came(&self) -> u64 {
        let Counts { zero_faults, remote_faults, prefetched, zeroed, .. } = self.counts();
        zero_faults + remote_faults + prefetched + zeroed
    }

    /// Returns the worker number by which requests of operators and programs use the volume, one at
    /// a time.
    fn control_worker(&self) -> usize {
        self.workers + 1
    }

    /// Waits until a page arrives or a frame is free, at most 2 ms.
    fn wait_for_change(&self, cache: MutexGuard<'_, Cache>) {
        going_to_sleep();
        // Tests run everything in one thread, so nothing changes during a wait.
        let timeout = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(2) };
        drop(self.fill_done.wait_timeout(cache, timeout).unwrap_or_else(PoisonError::into_inner));
    }

    /// Signals that pages have reached their places, and wakes the threads that wait for these.
    fn arrived(&self, pages: &[u64]) {
        self.fill_done.notify_all();
        if pages.is_empty() {
            return;
        }
        for program in self.programs() {
            pages.iter().for_each(|page| program.wake(&(*page..*page + 1)));
        }
    }
}

/// How long no page may leave before [`Engine::resize_cache`] fails.
const STUCK: Duration = Duration::from_secs(3);

/// The id that no program has.
const NO_PROGRAM: u64 = u64::MAX;

/// The bit that, with a program's id, names its guard.
const GUARD: u64 = 1 << 63;

/// Makes the epoll on which workers wait for faults, and the eventfd that wakes all of them.
fn events() -> io::Result<(OwnedFd, OwnedFd)> {
    let faults = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let end = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    epoll::add(&faults, &end, epoll::EventData::new_u64(NO_PROGRAM), epoll::EventFlags::IN)?;
    Ok((faults, end))
}

/// Logs lost and recovered lenders. The engine itself reports a lost page to its programs.
fn log(event: &Event) {
    match event.what {
        Happening::LenderLost { .. } => tracing::error!("{}", event.what),
        Happening::LenderBack { .. } => tracing::info!("{}", event.what),
        Happening::PageLost { .. } | Happening::SpillStarted | Happening::SpillEnded => {}
    }
}

/// Returns how many threads use the volume at a time.
fn volume_workers(workers: usize) -> usize {
    workers + 2
}

fn bytes(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE_SIZE as u64..pages.end * PAGE_SIZE as u64
}
