//! The engine: every page of a region is in one place, and moves between them by these few steps.
//!
//! ```text
//!            fill (fault)                    unmap (victim named)
//!  Zero ───────────────────▶ Resident ───────────────────────────▶ Unmapped
//!  Remote ─────────────────▶    ▲                                   │   │
//!    ▲                          └────────── map (touched again) ────┘   │
//!    └────────────────────────── write back if dirty, take out ─────────┘
//! ```
//!
//! A resident page that is equal to others of the group leaves the file, too, but not the page table: it is `Shared` ([`sharing`]).
//!
//! A page on its way is `Filling` or `Leaving`: whoever does it holds no lock meanwhile, everybody else keeps off it, and a fault on it
//! waits. All changes of the table are made under the lock of the cache. The table is in shared memory and says at every moment enough
//! for another engine to go on ([`recover`]).

mod coming;
#[cfg(test)]
mod crash;
mod dirty;
mod discard;
mod evict;
mod expected;
mod fault;
mod incoming;
mod link;
mod outgoing;
mod persist;
mod prefetch;
mod programs;
mod recover;
mod sharing;

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

use aquifer_fabric::sleep::going_to_sleep;
use aquifer_fabric::turn::Turn;
use aquifer_page::{Bytes, EXTENT_SIZE, PAGE_SIZE};
use aquifer_pool::{Event, Happening, LeaseTarget, Upkeep, Volume, VolumeConfig};
use rustix::event::epoll;
use serde::{Deserialize, Serialize};

use crate::counters::{Counters, Counts, Times};
use crate::error::RegionError;
use crate::file::RegionFile;
use crate::frames::{Frames, Sharers};
use crate::lock;
use crate::places::Places;
use crate::policy::{Policy, PolicyKind};
use crate::prefetch::PrefetchKind;
use crate::program::Program;
use crate::table::{Place, Table};
use expected::Expected;
pub(crate) use expected::waiting_programs;
pub use incoming::Incoming;
use link::Link;
pub use link::LinkSpec;
use outgoing::Outgoing;
use prefetch::Early;
pub use sharing::{Merged, Proposal};

/// When victims leave the cache (Disaggregation, section 4.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// When a page needs the frame.
    OnDemand,
    /// Before that: a few frames are kept free, so that the fetch need not wait for a victim to leave.
    #[default]
    PreEvict,
}

/// What an engine is made with.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// How much of the region may be in its local cache.
    pub cache: Bytes,
    /// Which pages leave.
    pub policy: PolicyKind,
    /// When they do.
    pub scheme: Scheme,
    /// What is fetched before it is touched.
    pub prefetch: PrefetchKind,
    /// A link to be emulated, slower than the real one.
    pub link: Option<LinkSpec>,
    /// How long a thread of a program waits for a page that cannot be fetched; then it gets `SIGBUS`. For ever unless said.
    pub give_up: Option<Duration>,
    /// How many faults are served at a time.
    pub workers: usize,
    /// The volume is another engine's, on another host: nothing may be written to it yet, or any more.
    pub foreign: bool,
}

/// How much of a region is where, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The region's size.
    pub size: Bytes,
    /// The local cache's limit.
    pub cache: Bytes,
    /// In the local cache.
    pub resident: Bytes,
    /// Kept once for several regions of the group, and no part of the local cache.
    #[serde(default)]
    pub shared: Bytes,
    /// Of that, what is known to differ from what lenders have; a page that a program has mapped may be dirty without that being known.
    pub dirty: Bytes,
    /// With lenders only.
    pub remote: Bytes,
    /// Never written, or discarded.
    pub zero: Bytes,
    /// With the host that the region came from, and on its way.
    pub coming: Bytes,
}

/// The local cache.
#[derive(Debug)]
struct Cache {
    /// Frames that there may be.
    limit: u64,
    /// Frames taken: by pages in the file, or on their way into it.
    frames: u64,
    policy: Box<dyn Policy>,
    scheme: Scheme,
    /// Frames beyond the limit that may be taken just now, as programs that cannot be ordered to give up pages hold so many: others are served
    /// all the same.
    beyond: u64,
    /// The thread that keeps frames free is at it.
    making_room: bool,
    /// Somebody wants to know when faults have to wait for room, or would soon; and they have.
    watched: bool,
    is_short: bool,
    /// Victims that are out of the page tables, the oldest first. Those that were touched since are still listed.
    cooling: VecDeque<u64>,
    /// What the host has to which the region is being handed over.
    outgoing: Option<Outgoing>,
    /// Pages that are waited for and come from the host that had the region before. Those that came since are still listed.
    coming: VecDeque<u64>,
}

/// A fault that could not be served.
#[derive(Clone, Copy, Debug)]
struct Stalled {
    since: Instant,
    /// It is to be tried again; else it is being tried.
    waits: bool,
}

/// The engine of a region.
#[derive(Debug)]
pub struct Engine {
    file: RegionFile,
    table: Table,
    volume: Arc<Volume>,
    /// Calls lost lenders, from the start of this engine to its end.
    upkeep: Mutex<Option<Upkeep>>,
    workers: usize,
    prefetch: PrefetchKind,
    early: Early,
    link: Option<Link>,
    give_up: Option<Duration>,
    cache: Mutex<Cache>,
    /// A frame is free, or a page that was on its way has arrived.
    settled: Condvar,
    /// There are fewer free frames than there should be.
    short: Condvar,
    /// Faults have come for which there is no room, and that is watched.
    watch: Condvar,
    programs: RwLock<Vec<Arc<Program>>>,
    expected: Mutex<Expected>,
    /// No program may come: the region is being removed. Looked at under the lock of the programs.
    removing: AtomicBool,
    /// How often programs have unmapped something: what they had written to there was known to their page tables only.
    released: AtomicU64,
    next_program: AtomicU64,
    /// The programs' userfaultfds, and what says that it is the end.
    faults: OwnedFd,
    end: OwnedFd,
    /// To wait for faults: one that a lender answers at once is served without waking another thread.
    turn: Arc<Turn>,
    /// Faults that could not be served, by program and page.
    stalled: Mutex<HashMap<(u64, u64), Stalled>>,
    /// Some of them are to be tried again.
    retry: Condvar,
    /// Something could not be fetched or written, and the log says so.
    trouble: AtomicBool,
    fetching: AtomicUsize,
    counters: Counters,
    ended: AtomicBool,
    /// No page may leave, and nothing be written to the volume: it is being handed over, or another host's.
    frozen: AtomicBool,
    /// Which frames of the group its pages are.
    sharers: Sharers,
    frames: Frames,
    /// Held by who has pages be shared.
    sharing: Mutex<()>,
    /// Held by who looks for what is dirty: what one has found the next does not find.
    looking: Mutex<()>,
    /// Pages that an engine before this one was about to discard, and that lenders may have still.
    leftovers: Mutex<Vec<Range<u64>>>,
    /// Where the volume's extents are, as it is kept for the next engine.
    places: Arc<Places>,
}

impl Engine {
    /// Takes up the region in the file `region`, with what an engine before it left in `table`, `places`, `sharers` and `programs`, if there was
    /// one. `frames` is the file of what its group shares.
    ///
    /// # Errors
    /// Where the files cannot be used; where it is the region's first engine, also where a lease cannot be reached.
    pub fn open(
        config: &EngineConfig,
        volume: VolumeConfig,
        leases: &[LeaseTarget],
        [region, table, places, sharers]: [(&Path, File); 4],
        [programs, frames]: [PathBuf; 2],
    ) -> Result<Self, RegionError> {
        let joined = |volume: VolumeConfig, resumes| {
            let volume = Volume::new(volume)?;
            for lease in leases.iter().cloned() {
                // Programs are to have what is here also while a lender is away.
                if resumes { volume.resume_lease(lease)? } else { volume.add_lease(lease)? }
            }
            Ok(volume)
        };
        Self::over(config, volume, joined, [region, table, places, sharers], [programs, frames])
    }

    /// The same over a volume whose leases `joined` adds. It is told whether an engine before this one had found them usable.
    fn over(
        config: &EngineConfig,
        volume: VolumeConfig,
        joined: impl FnOnce(VolumeConfig, bool) -> Result<Volume, RegionError>,
        [region, table, places, sharers]: [(&Path, File); 4],
        [programs, frames]: [PathBuf; 2],
    ) -> Result<Self, RegionError> {
        let fail = |path: &Path| RegionError::io(format!("cannot map {}", path.display()));
        let file = RegionFile::new(region.1).map_err(fail(region.0))?;
        let pages = file.pages();
        let extents = (pages * PAGE_SIZE as u64).div_ceil(EXTENT_SIZE);
        let table = Table::new(&table.1, pages).map_err(fail(table.0))?;
        let places = Arc::new(Places::new(&places.1, extents).map_err(fail(places.0))?);
        let sharers = Sharers::new(&sharers.1, pages).map_err(fail(sharers.0))?;
        // Two more than serve faults: one evicts, one discards.
        let workers = volume_workers(config.workers);
        let fail = RegionError::io(format!("cannot read {}", programs.display()));
        let mapped = [region.0.to_owned(), frames.clone()];
        let expected = Expected::open(programs, mapped).map_err(fail)?;
        let resumes = places.all().next().is_some() || !table.is_new() || expected.missing() > 0;
        let volume =
            joined(VolumeConfig { workers, ledger: Some(places.clone()), ..volume }, resumes)?;
        if resumes && !config.foreign {
            // The engine before may have been killed before it told the lenders.
            volume.end_older_generations();
        }
        let volume = Arc::new(volume);
        let expected = Mutex::new(expected);
        let (faults, end) = events().map_err(RegionError::io("cannot make an epoll"))?;
        let cache = Cache {
            limit: (config.cache.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES),
            frames: 0,
            policy: config.policy.make(pages),
            scheme: config.scheme,
            beyond: 0,
            making_room: false,
            watched: false,
            is_short: false,
            cooling: VecDeque::new(),
            outgoing: None,
            coming: VecDeque::new(),
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
            give_up: config.give_up,
            cache: Mutex::new(cache),
            settled: Condvar::new(),
            short: Condvar::new(),
            watch: Condvar::new(),
            programs: RwLock::default(),
            expected,
            removing: AtomicBool::new(false),
            released: AtomicU64::new(0),
            next_program: AtomicU64::new(0),
            faults,
            end,
            turn: Arc::default(),
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
            places: places.clone(),
        };
        engine
            .recover(&places)
            .map_err(RegionError::io(format!("cannot read {}", region.0.display())))?;
        Ok(engine)
    }

    /// No cache is smaller: every processor must find some pages there at a time to get on at all.
    pub const LEAST_FRAMES: u64 = 64;

    /// Starts serving, until [`end`](Self::end).
    ///
    /// # Errors
    /// If threads cannot be started.
    pub fn start(self: &Arc<Self>) -> io::Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        let engine = Arc::downgrade(self);
        // While the region is another host's, that host's engine is the one to call its lenders.
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

    /// Has the threads end.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        *lock(&self.upkeep) = None;
        // Each under the lock under which it is looked whether to sleep. Where the first fails, there was an end before.
        let _ = rustix::io::write(&self.end, &1_u64.to_ne_bytes());
        self.turn.end();
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

    /// Refuses what would change what is handed over.
    fn may_change(&self) -> Result<(), RegionError> {
        if self.is_frozen() {
            return Err(RegionError::Misuse(
                "the region is being handed over to another host".to_owned(),
            ));
        }
        Ok(())
    }

    /// The region's volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// What has happened since it started.
    pub fn counts(&self) -> Counts {
        self.counters.counts()
    }

    /// How long remote faults took.
    pub fn times(&self) -> Times {
        self.counters.times()
    }

    /// How long an emulated link took to bring what was fetched.
    pub fn link_times(&self) -> Option<Times> {
        self.link.as_ref().map(Link::took)
    }

    /// Faults that could not be served so far, and faults whose page is being fetched just now.
    pub fn waiting(&self) -> [usize; 2] {
        [lock(&self.stalled).len(), self.fetching.load(Ordering::Relaxed)]
    }

    /// What is where.
    pub fn usage(&self) -> Usage {
        let mut pages = [0; 6];
        for page in 0..self.table.pages() {
            let is = self.table.get(page);
            match is.place {
                Place::Zero | Place::Remote if is.coming => pages[4] += 1,
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
        // Pages move while they are counted: one that left may count, and the one that came for it,
        // too. Each that is here has a frame.
        let extra = pages[2].saturating_sub(frames);
        pages[2] -= extra;
        pages[3] = pages[3].min(pages[2]);
        pages[1] += extra;
        let [zero, remote, resident, dirty, coming, shared] = pages.map(bytes);
        let (size, cache) = (bytes(self.table.pages()), bytes(limit));
        Usage { size, cache, resident, shared, dirty, remote, zero, coming }
    }

    /// Changes the limit of the local cache. Returns when the cache is within it.
    ///
    /// # Errors
    /// When pages cannot leave: it says what they wait for. The limit is the new one all the same.
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
                    "all is on its way".to_owned()
                } else {
                    self.who_is_away()
                };
                return Err(RegionError::Refused(format!(
                    "{over} over the limit cannot leave the cache: {why}"
                )));
            }
            self.evict(self.control_worker(), evict::BATCH)?;
        }
    }

    /// Changes the limit of the local cache. What is over it leaves as there are faults.
    pub fn limit_cache(&self, limit: Bytes) {
        let mut cache = lock(&self.cache);
        cache.limit = (limit.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES);
        cache.beyond = 0;
    }

    /// The limit of the local cache.
    pub fn cache(&self) -> Bytes {
        Bytes(lock(&self.cache).limit * PAGE_SIZE as u64)
    }

    /// Whether [`wait_until_short`](Self::wait_until_short) is to be told of faults.
    pub fn watch_room(&self, watched: bool) {
        lock(&self.cache).watched = watched;
    }

    /// Waits for a fault that finds little room or none. False at the end.
    pub fn wait_until_short(&self) -> bool {
        let mut cache = lock(&self.cache);
        cache.is_short = false;
        let enough = |cache: &mut Cache| !cache.is_short && !self.has_ended();
        drop(self.watch.wait_while(cache, enough).unwrap_or_else(PoisonError::into_inner));
        !self.has_ended()
    }

    /// How many pages have come into the cache.
    pub fn came(&self) -> u64 {
        let Counts { zero_faults, remote_faults, prefetched, zeroed, .. } = self.counts();
        zero_faults + remote_faults + prefetched + zeroed
    }

    /// Number under which those who are asked to by operators and programs use the volume: one at a time.
    fn control_worker(&self) -> usize {
        self.workers + 1
    }

    /// Waits until something has changed, but not for long.
    fn wait_for_change(&self, cache: MutexGuard<'_, Cache>) {
        going_to_sleep();
        // Tests play everything in one thread: nothing changes meanwhile.
        let timeout = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(2) };
        drop(self.settled.wait_timeout(cache, timeout).unwrap_or_else(PoisonError::into_inner));
    }

    /// Pages are where they were going: has everybody who waits for these, which are wanted, try again.
    fn arrived(&self, pages: &[u64]) {
        self.settled.notify_all();
        if pages.is_empty() {
            return;
        }
        for program in self.programs() {
            pages.iter().for_each(|page| program.wake(&(*page..*page + 1)));
        }
    }
}

/// How long no page may leave before whoever waits for a smaller cache is told so.
const STUCK: Duration = Duration::from_secs(3);

/// No program has this number.
const NO_PROGRAM: u64 = u64::MAX;

/// With a program's number: its guard.
const GUARD: u64 = 1 << 63;

/// Where faults are waited for, and what has all who wait there wake up.
fn events() -> io::Result<(OwnedFd, OwnedFd)> {
    let faults = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let end = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    epoll::add(&faults, &end, epoll::EventData::new_u64(NO_PROGRAM), epoll::EventFlags::IN)?;
    Ok((faults, end))
}

/// Logs lenders lost and back. What a lost page means to programs the engine tells by itself.
fn log(event: &Event) {
    match event.what {
        Happening::LenderLost { .. } => tracing::error!("{}", event.what),
        Happening::LenderBack { .. } => tracing::info!("{}", event.what),
        Happening::PageLost { .. } | Happening::SpillStarted | Happening::SpillEnded => {}
    }
}

/// How many threads use the volume at a time.
fn volume_workers(workers: usize) -> usize {
    workers + 2
}

fn bytes(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE_SIZE as u64..pages.end * PAGE_SIZE as u64
}
