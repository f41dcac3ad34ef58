//! The upkeep of a volume beside its I/O: probes of lost lenders, and the return of spilled
//! extents.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::LeaseId;

use crate::events::{Event, Events};
use crate::lease::Lease;
use crate::placement::lease_id;
use crate::volume::Volume;

/// The period of checks while something is wrong or `may_act` returns `false`. Otherwise the thread
/// sleeps until an event.
const PERIOD: Duration = Duration::from_millis(500);

/// The time from one look at second copies to the next, while all is well.
const SCRUB: Duration = Duration::from_secs(5);

/// How long a lease must be healthy before spilled extents go there. With a lease that comes and
/// goes, they would move to and fro.
const SETTLED: Duration = Duration::from_secs(5);

/// The pause after a failed move of a spilled extent: the first and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(120));

/// The upkeep thread of a volume, which ends when this is dropped.
///
/// Without it, each thread that serves I/O would have to wait to learn whether a lost lender is
/// back.
#[derive(Debug)]
pub struct Upkeep {
    events: Arc<Events>,
    ended: Arc<AtomicBool>,
}

impl Upkeep {
    /// Starts the upkeep of the volume. The upkeep thread calls `tell` with each event; threads
    /// that serve I/O never do.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn start(
        volume: &Arc<Volume>,
        tell: impl FnMut(&Event) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_while(volume, || true, tell)
    }

    /// Starts the upkeep, which calls no lender and moves nothing while `may_act` returns `false`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_while(
        volume: &Arc<Volume>,
        may_act: impl FnMut() -> bool + Send + 'static,
        tell: impl FnMut(&Event) + Send + 'static,
    ) -> io::Result<Self> {
        let (events, ended) = (volume.events.clone(), Arc::new(AtomicBool::new(false)));
        let mut work = Work {
            volume: Arc::downgrade(volume),
            events: events.clone(),
            may_act,
            tell,
            told: 0,
            homecoming: Homecoming::default(),
            scrubs: Scrubs::default(),
            ended: ended.clone(),
        };
        thread::Builder::new().name("upkeep".to_owned()).spawn(move || {
            while !work.ended.load(Ordering::Relaxed)
                && let Some(pause) = work.round()
            {
                work.events.wait(pause);
            }
        })?;
        Ok(Self { events, ended })
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.events.wake();
    }
}

struct Work<M, T> {
    volume: Weak<Volume>,
    events: Arc<Events>,
    may_act: M,
    tell: T,
    told: u64,
    homecoming: Homecoming,
    scrubs: Scrubs,
    ended: Arc<AtomicBool>,
}

impl<M: FnMut() -> bool, T: FnMut(&Event)> Work<M, T> {
    /// Checks the volume once. Returns the time until the next check, if there is one without an
    /// event, or `None` if the volume is gone.
    fn round(&mut self) -> Option<Option<Duration>> {
        let volume = self.volume.upgrade()?;
        let ended = &self.ended;
        let may_act = &mut self.may_act;
        let is_well = may_act()
            && volume.try_lost_lenders()
                & self.homecoming.round(&volume)
                & volume.begin_disk_copies()
                & volume.repair_copies(|| !ended.load(Ordering::Relaxed) && may_act());
        let has_copies = may_act() && self.scrubs.round(&volume);
        for event in self.events.after(self.told) {
            self.told = event.number;
            (self.tell)(&event);
        }
        Some(match is_well {
            true => has_copies.then_some(SCRUB),
            false => Some(PERIOD),
        })
    }
}

/// The looks at pages of second copies that no program reads.
#[derive(Debug, Default)]
struct Scrubs {
    last: Option<Instant>,
}

impl Scrubs {
    /// Looks at some pages, if that is due. Returns whether there are second copies.
    fn round(&mut self, volume: &Volume) -> bool {
        if self.last.is_some_and(|last| last.elapsed() < SCRUB) {
            return true;
        }
        let has_copies = volume.scrub_copies();
        if has_copies {
            self.last = Some(Instant::now());
        }
        has_copies
    }
}

/// The return of spilled extents to lenders.
#[derive(Debug, Default)]
struct Homecoming {
    /// The time since which each lease has been healthy.
    well: BTreeMap<LeaseId, Instant>,
    /// The earliest time of the next attempt.
    next: Option<Instant>,
    backoff: Duration,
}

impl Homecoming {
    /// Moves one extent, if there is one and room for it. Returns whether the spill file is empty.
    fn round(&mut self, volume: &Volume) -> bool {
        if !volume.is_spilling() {
            self.well.clear();
            return true;
        }
        let leases: Vec<_> = volume.leases.list().clone();
        let now = Instant::now();
        let Some(to) = self.choose(&leases, now) else { return false };
        match volume.bring_back(&to) {
            Ok(true) => (self.next, self.backoff) = (None, Duration::ZERO),
            // Another extent had to move at once, or the lease has no slot left.
            Ok(false) => {}
            Err(_) => {
                self.backoff = (self.backoff * 2).clamp(BACKOFF.0, BACKOFF.1);
                self.next = Some(now + self.backoff);
            }
        }
        !volume.is_spilling()
    }

    /// Returns the lease with the most room, of those that have been healthy for long enough.
    fn choose(&mut self, leases: &[Arc<Lease>], now: Instant) -> Option<Arc<Lease>> {
        let well: Vec<_> =
            leases.iter().filter(|lease| lease.is_healthy() && lease.free() > 0).collect();
        let ids: Vec<_> = well.iter().filter_map(|lease| lease_id(lease)).collect();
        self.well.retain(|id, _| ids.contains(id));
        ids.iter().for_each(|id| _ = self.well.entry(*id).or_insert(now));
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        let since = |lease: &Lease| lease_id(lease).and_then(|id| self.well.get(&id));
        let settled =
            |lease: &Lease| since(lease).is_some_and(|since| now.duration_since(*since) >= SETTLED);
        well.into_iter().filter(|lease| settled(lease)).max_by_key(|lease| lease.free()).cloned()
    }
}
