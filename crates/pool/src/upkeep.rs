//! What is done for a volume beside its I/O: lost lenders are tried, and spilled extents brought back to lenders.

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

/// How often there is another look while a lender is lost or something is spilled. Nobody looks while all is well.
const PERIOD: Duration = Duration::from_millis(500);

/// How long a lease must have been well before spilled extents go there: one that comes and goes would have them move to and fro.
const SETTLED: Duration = Duration::from_secs(5);

/// After a spilled extent could not be moved, this long passes before the next attempt: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(120));

/// The thread that looks after a volume, until this is dropped.
///
/// The threads that serve I/O then need not find out whether a lost lender is back, for which each would have to wait.
#[derive(Debug)]
pub struct Upkeep {
    events: Arc<Events>,
    ended: Arc<AtomicBool>,
}

impl Upkeep {
    /// Starts looking after the volume. `tell` hears of each event, never on a thread that serves I/O.
    ///
    /// # Errors
    /// If the system has no room for a thread.
    pub fn start(
        volume: &Arc<Volume>,
        tell: impl FnMut(&Event) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_while(volume, || true, tell)
    }

    /// The same, but calls no lender and moves nothing while `may_act` says no.
    ///
    /// # Errors
    /// As `start`.
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
        };
        let end = ended.clone();
        thread::Builder::new().name("upkeep".to_owned()).spawn(move || {
            while !end.load(Ordering::Relaxed)
                && let Some(is_well) = work.round()
            {
                work.events.wait((!is_well).then_some(PERIOD));
            }
        })?;
        Ok(Self { events, ended })
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.events.ring();
    }
}

struct Work<M, T> {
    volume: Weak<Volume>,
    events: Arc<Events>,
    may_act: M,
    tell: T,
    told: u64,
    homecoming: Homecoming,
}

impl<M: FnMut() -> bool, T: FnMut(&Event)> Work<M, T> {
    /// One look, and whether all is well; nothing where the volume is gone.
    fn round(&mut self) -> Option<bool> {
        let volume = self.volume.upgrade()?;
        let is_well =
            (self.may_act)() && volume.try_lost_lenders() & self.homecoming.round(&volume);
        for event in self.events.after(self.told) {
            self.told = event.number;
            (self.tell)(&event);
        }
        Some(is_well)
    }
}

/// When spilled extents go back to lenders, and to which.
#[derive(Debug, Default)]
struct Homecoming {
    /// Since when each lease has been well.
    well: BTreeMap<LeaseId, Instant>,
    /// Not before then.
    next: Option<Instant>,
    backoff: Duration,
}

impl Homecoming {
    /// Moves one extent, if there is one and room for it. Whether nothing is spilled any more.
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
            // Others had something to move.
            Ok(false) => {}
            Err(_) => {
                self.backoff = (self.backoff * 2).clamp(BACKOFF.0, BACKOFF.1);
                self.next = Some(now + self.backoff);
            }
        }
        !volume.is_spilling()
    }

    /// The lease with the most room of those that have been well for a while.
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
