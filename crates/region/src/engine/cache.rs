//! The local cache: its limit, its free frames, and the waits for them.

use std::collections::VecDeque;
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};
use aquifer_transport::sleep::going_to_sleep;

use super::evict::{BATCH, FEW};
use super::outgoing::Outgoing;
use super::{Engine, EngineConfig, Scheme};
use crate::error::RegionError;
use crate::lock;
use crate::policy::Policy;
use crate::table::{Page, Place};

/// The least part of the cache that can leave for leases smaller than the region. Then a fault
/// always finds a page that has a place at a lender.
const MARGIN: Bytes = Bytes::mib(4);

/// How long no page may leave before a request that needs room fails.
pub(super) const STUCK: Duration = Duration::from_secs(3);

/// The local cache.
#[derive(Debug)]
pub(super) struct Cache {
    /// The limit, in frames.
    pub(super) limit: u64,
    /// The pages of the region.
    pages: u64,
    /// The frames in use by pages in the file or on their way into it.
    pub(super) frames: u64,
    pub(super) policy: Box<dyn Policy>,
    pub(super) scheme: Scheme,
    /// The frames allowed beyond the limit for now. Programs that take no orders may hold that
    /// many, and the other programs must still be served.
    pub(super) beyond: u64,
    /// The thread that keeps frames free is working.
    pub(super) making_room: bool,
    pub(super) shortage: Shortage,
    /// Victims outside the page tables, the oldest first. Pages touched since are still listed.
    pub(super) cold_list: VecDeque<u64>,
    /// The leases that are about to leave, once for each request.
    pub(super) leaving: Vec<LeaseId>,
    /// The next page to look at if the policy finds no page that can leave.
    pub(super) hand: u64,
    /// The pages that the destination host has, during a hand-over.
    pub(super) outgoing: Option<Outgoing>,
    /// Pages that threads wait for and that come from the source host. Pages that came since are
    /// still listed.
    pub(super) awaiting_source: VecDeque<u64>,
}

/// Faults that find little room or none.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// A caller of [`Engine::wait_until_short`] wants to hear of them.
    pub(super) watched: bool,
    /// There were some.
    pub(super) occurred: bool,
}

/// The events that threads wait for, with the lock of the cache.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// A frame became free, or a page arrived.
    pub(super) fill_done: Condvar,
    /// Free frames fell below the reserve.
    pub(super) short: Condvar,
    /// A watched fault found little room or none.
    pub(super) watch: Condvar,
}

impl Cache {
    pub(super) fn new(config: &EngineConfig, pages: u64) -> Self {
        Self {
            limit: (config.cache.0 / PAGE_SIZE as u64).max(Engine::LEAST_FRAMES),
            pages,
            frames: 0,
            policy: config.paging.policy.make(pages),
            scheme: config.paging.scheme,
            beyond: 0,
            making_room: false,
            shortage: Shortage::default(),
            cold_list: VecDeque::new(),
            leaving: Vec::new(),
            hand: 0,
            outgoing: None,
            awaiting_source: VecDeque::new(),
        }
    }

    pub(super) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.frames)
    }

    /// Returns whether a touched page may take a frame.
    pub(super) fn has_room(&self) -> bool {
        self.frames < self.limit + self.beyond
    }

    /// Returns the number of frames to keep free for faults.
    pub(super) fn reserve(&self) -> u64 {
        match self.scheme {
            // All pages fit, so no page needs the frame of another one.
            _ if self.limit >= self.pages => 0,
            Scheme::OnDemand => 0,
            Scheme::PreEvict => (self.limit / 16).min(4 * BATCH as u64),
        }
    }

    /// Returns how many pages a fault evicts if it finds no frame. It needs one; the rest serves
    /// later faults.
    pub(super) fn evicted_at_once(&self) -> usize {
        match self.scheme {
            Scheme::OnDemand => 1,
            Scheme::PreEvict => FEW,
        }
    }

    /// Returns how many victims stay in the cache for a while, so that a touch is seen.
    pub(super) fn cooled(&self) -> usize {
        if self.policy.looks_twice() { (self.limit / 16) as usize } else { 0 }
    }
}

impl Engine {
    /// The smallest cache, in frames. Every processor must find some pages there at a time to make
    /// progress.
    pub const LEAST_FRAMES: u64 = 64;

    /// Changes the limit of the local cache, and waits until the cache is within it.
    ///
    /// # Errors
    /// Pages cannot leave; the error names the reason. The new limit stays in force.
    pub fn resize_cache(&self, limit: Bytes) -> Result<(), RegionError> {
        self.may_change()?;
        self.may_limit(limit)?;
        if limit.0 < self.table.pages() * PAGE_SIZE as u64 {
            self.watch()?;
        }
        self.limit_cache(limit)?;
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
            self.evict(self.control_worker(), BATCH)?;
        }
    }

    /// Refuses a limit if pages that must then leave have no place, neither at lenders nor in the
    /// part of the spill file that is in use.
    ///
    /// # Errors
    /// The places are too few.
    pub fn may_limit(&self, limit: Bytes) -> Result<(), RegionError> {
        self.check_limit(&lock(&self.cache), limit)
    }

    fn check_limit(&self, cache: &Cache, limit: Bytes) -> Result<(), RegionError> {
        let volume = &self.lenders.volume;
        let spilled = volume.spilled().unwrap_or_default();
        let least = match volume.has_unnamed_spill() {
            true => Bytes::ZERO,
            false => self.least_cache(&cache.leaving).saturating_sub(spilled),
        };
        if limit >= least.min(Bytes(cache.limit * PAGE_SIZE as u64)) {
            return Ok(());
        }
        Err(RegionError::Misuse(format!(
            "the region has too little memory at lenders, so a cache below {least} would stop its \
             programs; this host's agent borrows more before it makes the cache smaller"
        )))
    }

    /// Returns the smallest cache with which programs go on, `without` these leases and without the
    /// spill file.
    pub(super) fn least_cache(&self, without: &[LeaseId]) -> Bytes {
        let size = Bytes(self.table.pages() * PAGE_SIZE as u64);
        match self.lenders.volume.shortage(without) {
            Bytes::ZERO => Bytes::ZERO,
            shortage => (shortage + MARGIN).min(size),
        }
    }

    /// Changes the limit of the local cache. Pages over it leave with later faults.
    ///
    /// # Errors
    /// Those of [`Self::may_limit`].
    pub fn limit_cache(&self, limit: Bytes) -> Result<(), RegionError> {
        let frames = (limit.0 / PAGE_SIZE as u64).max(Self::LEAST_FRAMES);
        let mut cache = lock(&self.cache);
        // A lease may have left since the caller checked.
        self.check_limit(&cache, limit)?;
        cache.limit = frames;
        cache.beyond = 0;
        Ok(())
    }

    /// Returns the limit of the local cache.
    pub fn cache(&self) -> Bytes {
        Bytes(lock(&self.cache).limit * PAGE_SIZE as u64)
    }

    /// Sets whether [`wait_until_short`](Self::wait_until_short) hears of faults.
    pub fn watch_room(&self, watched: bool) {
        lock(&self.cache).shortage.watched = watched;
    }

    /// Waits for a fault that finds little room or none. Returns false once the engine has ended.
    pub fn wait_until_short(&self) -> bool {
        let mut cache = lock(&self.cache);
        cache.shortage.occurred = false;
        let enough = |cache: &mut Cache| !cache.shortage.occurred && !self.has_ended();
        drop(self.signals.watch.wait_while(cache, enough).unwrap_or_else(PoisonError::into_inner));
        !self.has_ended()
    }

    /// Marks a page as on its `way`: `Filling`, with a frame, or `Leaving`. The caller found it in
    /// its place, as `is`; from now on, only the caller's thread moves it.
    pub(super) fn take(&self, cache: &mut Cache, page: u64, is: Page, way: Place) {
        if is.place == Place::Resident {
            cache.policy.went(page);
        }
        if way == Place::Filling && !is.has_frame() {
            cache.frames += 1;
        }
        self.table.set(page, is.at(way));
    }

    /// Waits until the page is in its place. Returns the locked cache, and the page's state.
    pub(super) fn lock_in_place(&self, page: u64) -> (MutexGuard<'_, Cache>, Page) {
        loop {
            let cache = lock(&self.cache);
            let is = self.table.get(page);
            if is.is_in_place() {
                return (cache, is);
            }
            self.wait_for_change(cache);
        }
    }

    /// Waits until a page arrives or a frame is free, at most 2 ms.
    pub(super) fn wait_for_change(&self, cache: MutexGuard<'_, Cache>) {
        going_to_sleep();
        // Tests run everything in one thread, so nothing changes during a wait.
        let timeout = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(2) };
        drop(
            self.signals
                .fill_done
                .wait_timeout(cache, timeout)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Signals that pages have reached their places, and wakes the threads that wait for these.
    pub(super) fn arrived(&self, pages: &[u64]) {
        self.signals.fill_done.notify_all();
        if pages.is_empty() {
            return;
        }
        for program in self.programs() {
            pages.iter().for_each(|page| program.wake(&(*page..*page + 1)));
        }
    }
}
