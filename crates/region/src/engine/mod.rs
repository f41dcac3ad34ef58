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
use aquifer_mapping::{Attach, Connection, Run, Userfault};
use aquifer_page::{Bytes, EXTENT_SIZE, PAGE_SIZE};
use aquifer_pool::{LeaseTarget, Volume, VolumeConfig};
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
use expected::{Expected, Mapped};
pub use incoming::Incoming;
use link::Link;
pub use link::LinkSpec;
use outgoing::Outgoing;
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
    volume: Volume,
    workers: usize,
    prefetch: PrefetchKind,
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
    /// Where the volume's extents are, as it is kept for the next engine.
    places: Arc<Places>,
}

impl Engine {
    /// Takes up the region in the file `region`, with what an engine before it left in `table`, `places`, `sharers` and `programs`, if there was
    /// one. `frames` is the file of what its group shares.
    ///
    /// # Errors
    /// Where the files cannot be used, or a lease cannot be reached.
    pub fn open(
        config: &EngineConfig,
        volume: VolumeConfig,
        leases: &[LeaseTarget],
        [region, table, places, sharers]: [(&Path, File); 4],
        [programs, frames]: [PathBuf; 2],
    ) -> Result<Self, RegionError> {
        let joined = |volume: VolumeConfig| {
            let volume = Volume::new(volume)?;
            leases.iter().try_for_each(|lease| volume.add_lease(lease.clone()))?;
            Ok(volume)
        };
        Self::over(config, volume, joined, [region, table, places, sharers], [programs, frames])
    }

    /// The same over a volume whose leases `joined` adds.
    fn over(
        config: &EngineConfig,
        volume: VolumeConfig,
        joined: impl FnOnce(VolumeConfig) -> Result<Volume, RegionError>,
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
        let volume = joined(VolumeConfig { workers, ledger: Some(places.clone()), ..volume })?;
        let (faults, end) = events().map_err(RegionError::io("cannot make an epoll"))?;
        let fail = RegionError::io(format!("cannot read {}", programs.display()));
        let expected = Mutex::new(Expected::open(programs).map_err(fail)?);
        let cache = Cache {
            limit: (config.cache.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES),
            frames: 0,
            policy: config.policy.make(pages),
            scheme: config.scheme,
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
            workers: config.workers,
            prefetch: config.prefetch,
            link: config.link.map(Link::new),
            give_up: config.give_up,
            cache: Mutex::new(cache),
            settled: Condvar::new(),
            short: Condvar::new(),
            watch: Condvar::new(),
            programs: RwLock::default(),
            expected,
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
            places: places.clone(),
        };
        engine.recover(&places).map_err(RegionError::io(format!("cannot read {}", region.0.display())))?;
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
        for worker in 0..self.workers {
            let engine = self.clone();
            let body = move || engine.serve_faults(worker);
            threads.push(thread::Builder::new().name(format!("fault-{worker}")).spawn(body)?);
        }
        let engine = self.clone();
        threads.push(thread::Builder::new().name("evict".to_owned()).spawn(move || engine.keep_room())?);
        let engine = self.clone();
        threads.push(thread::Builder::new().name("retry".to_owned()).spawn(move || engine.retry_stalled())?);
        Ok(threads)
    }

    /// Has the threads end.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
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
            return Err(RegionError::Misuse("the region is being handed over to another host".to_owned()));
        }
        Ok(())
    }

    /// Takes care of a mapping from now on, and returns when its program has let go of it.
    ///
    /// # Errors
    /// Where the mapping is not one of this region, or its program cannot be looked at. The program is told so.
    pub fn attend(&self, attach: &Attach, userfaults: [OwnedFd; 2], orders: Connection) -> io::Result<()> {
        let (program, mapped) = self.attach(attach, userfaults.map(Userfault::from), orders)?;
        let hangup = rustix::event::PollFlags::empty();
        let mut fds = [rustix::event::PollFd::new(program.connection(), hangup)];
        // Only a hang-up ends this.
        while rustix::event::poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
        self.detach(&program);
        lock(&self.expected).remove(&mapped);
        Ok(())
    }

    fn attach(
        &self,
        attach: &Attach,
        userfaults: [Userfault; 2],
        orders: Connection,
    ) -> io::Result<(Arc<Program>, Mapped)> {
        let refuse = |why: String| {
            let _ = orders.send(&aquifer_mapping::Reply::Refused(why.clone()), &[]);
            io::Error::other(why)
        };
        if attach.version != aquifer_mapping::VERSION {
            return Err(refuse(format!(
                "it speaks version {} of the protocol, this engine {}: use programs of one release",
                attach.version,
                aquifer_mapping::VERSION
            )));
        }
        let Run { first, count } = attach.pages;
        if first.checked_add(count).is_none_or(|end| end > self.table.pages()) {
            return Err(refuse("the mapping is larger than the region".to_owned()));
        }
        let mapped = Mapped::new(orders.peer()?, attach.address)?;
        let id = self.next_program.fetch_add(1, Ordering::Relaxed);
        let program = Arc::new(Program::new(id, attach, userfaults, orders, self.prefetch)?);
        if let Err(error) = self.take_care(&program, mapped) {
            self.programs_mut().retain(|other| !Arc::ptr_eq(other, &program));
            // It has pages mapped, and comes back.
            lock(&self.expected).is_away(mapped);
            return Err(error);
        }
        tracing::info!(program = program.name(), pages = count, "mapped");
        Ok((program, mapped))
    }

    fn take_care(&self, program: &Arc<Program>, mapped: Mapped) -> io::Result<()> {
        // Where an engine before this one took care of it, no page may leave before both are done.
        program.accept(|| {
            self.programs_mut().push(program.clone());
            lock(&self.expected).add(mapped)
        })?;
        self.settle_shared().map_err(io::Error::other)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        for (userfault, id) in [(&program.userfault, program.id), (&program.guard, program.id | GUARD)] {
            epoll::add(&self.faults, userfault, epoll::EventData::new_u64(id), flags)?;
        }
        // Whoever an engine before this one was told of and did not serve.
        program.wake_all();
        Ok(())
    }

    fn detach(&self, program: &Arc<Program>) {
        let _ = epoll::delete(&self.faults, &program.userfault);
        let _ = epoll::delete(&self.faults, &program.guard);
        self.programs_mut().retain(|other| !Arc::ptr_eq(other, program));
        self.lose_marks(&mut lock(&self.cache));
        tracing::info!(process = program.pid, "unmapped");
    }

    fn programs(&self) -> Vec<Arc<Program>> {
        self.programs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn program(&self, id: u64) -> Option<Arc<Program>> {
        let programs = self.programs.read().unwrap_or_else(PoisonError::into_inner);
        programs.iter().find(|program| program.id == id).cloned()
    }

    fn programs_mut(&self) -> std::sync::RwLockWriteGuard<'_, Vec<Arc<Program>>> {
        self.programs.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that have the region mapped, for people.
    pub fn mapped_by(&self) -> Vec<String> {
        self.programs().iter().map(|program| program.name()).collect()
    }

    /// The processes that have it mapped.
    pub fn processes(&self) -> Vec<u32> {
        self.programs().iter().map(|program| program.pid).collect()
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
        let [zero, remote, resident, dirty, coming, shared] = pages.map(bytes);
        let (size, cache) = (bytes(self.table.pages()), bytes(lock(&self.cache).limit));
        Usage { size, cache, resident, shared, dirty, remote, zero, coming }
    }

    /// Changes the limit of the local cache. Returns when the cache is within it.
    ///
    /// # Errors
    /// When pages cannot leave; the limit is the new one all the same.
    pub fn resize_cache(&self, limit: Bytes) -> Result<(), RegionError> {
        let over = |cache: &Cache| cache.frames > cache.limit;
        self.may_change()?;
        self.limit_cache(limit);
        while over(&lock(&self.cache)) {
            self.evict(self.control_worker(), evict::BATCH)?;
        }
        Ok(())
    }

    /// Changes the limit of the local cache. What is over it leaves as there are faults.
    pub fn limit_cache(&self, limit: Bytes) {
        lock(&self.cache).limit = (limit.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES);
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

/// How many threads use the volume at a time.
fn volume_workers(workers: usize) -> usize {
    workers + 2
}

fn bytes(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE_SIZE as u64..pages.end * PAGE_SIZE as u64
}
