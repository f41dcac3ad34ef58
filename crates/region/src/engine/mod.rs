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

mod cache;
#[cfg(test)]
mod crash;
mod dirty;
mod discard;
mod evict;
mod fault;
mod home;
mod incoming;
mod leases;
mod lenders;
mod lifecycle;
mod link;
mod outgoing;
mod persist;
mod placed;
mod postcopy;
mod prefetch;
mod programs;
mod recover;
mod sharing;
mod split;
mod stalled;
mod status;
mod surviving_mappings;
mod together;
mod watching;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_page::{Bytes, PAGE_SIZE, WorkerId};
use aquifer_volume::{DiskCopies, SecondCopy, SpillFile, Volume};
use serde::{Deserialize, Serialize};

use self::cache::{Cache, Signals};
use self::fault::Faults;
pub use self::incoming::Incoming;
use self::lenders::Lenders;
pub use self::link::LinkSpec;
use self::prefetch::Early;
use self::programs::Programs;
use self::sharing::GroupPages;
pub use self::sharing::{Merged, Proposal};
pub use self::status::Usage;
pub(crate) use self::surviving_mappings::waiting_programs;
use self::watching::Watching;
use crate::counters::Counters;
use crate::error::RegionError;
use crate::file::RegionFile;
use crate::policy::PolicyKind;
use crate::prefetch::PrefetchKind;
use crate::table::Table;

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

/// How an engine fetches and evicts pages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Paging {
    /// The policy that chooses victims.
    pub policy: PolicyKind,
    /// When victims leave the cache.
    pub scheme: Scheme,
    /// The prefetcher.
    pub prefetch: PrefetchKind,
    /// An emulated link, slower than the real one.
    pub link: Option<LinkSpec>,
    /// How long a program waits for a page that cannot be fetched, before it gets `SIGBUS`. `None`:
    /// no limit.
    pub fault_timeout: Option<Duration>,
    /// How many faults the engine serves at a time.
    pub workers: usize,
}

impl Paging {
    /// The default number of workers.
    pub const DEFAULT_WORKERS: usize = 2;
}

impl Default for Paging {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            scheme: Scheme::default(),
            prefetch: PrefetchKind::default(),
            link: None,
            fault_timeout: None,
            workers: Self::DEFAULT_WORKERS,
        }
    }
}

/// The configuration of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The limit of the local cache.
    pub cache: Bytes,
    /// While all pages fit into the cache and none has left it, nobody watches the programs: their
    /// faults are the kernel's alone.
    pub may_be_unwatched: bool,
    /// How pages come and leave.
    pub paging: Paging,
    /// The region's spill file, if it has one.
    pub spill: Option<SpillFile>,
    /// The second copies of leases' pages, on other leases.
    pub copies: Vec<SecondCopy>,
    /// Where second copies are on this host's disk, if the region keeps some.
    pub disk: Option<DiskCopies>,
    /// The volume belongs to another host's engine. This engine must not write to it, until it owns
    /// the region.
    pub foreign: bool,
}

/// The engine of a region.
#[derive(Debug)]
pub struct Engine {
    file: RegionFile,
    /// The places of the pages; it changes under the lock of the cache.
    table: Table,
    cache: Mutex<Cache>,
    signals: Signals,
    group: GroupPages,
    lenders: Lenders,
    programs: Programs,
    faults: Faults,
    early: Early,
    counters: Counters,
    watching: Watching,
    phase: Phase,
}

/// The phase of an engine's life.
#[derive(Debug)]
struct Phase {
    /// The engine serves nothing more.
    ended: AtomicBool,
    /// No page may leave, and no write may reach the volume, as the region is handed over or
    /// another host's.
    frozen: AtomicBool,
}

impl Engine {
    fn has_ended(&self) -> bool {
        self.phase.ended.load(Ordering::Relaxed)
    }

    fn is_frozen(&self) -> bool {
        self.phase.frozen.load(Ordering::Relaxed)
    }

    /// Refuses a change during a hand-over, or while the region is another host's.
    pub(crate) fn may_change(&self) -> Result<(), RegionError> {
        if self.is_frozen() {
            return Err(RegionError::Misuse(
                "the region is being handed over to another host".to_owned(),
            ));
        }
        Ok(())
    }

    /// Returns the region's volume.
    pub fn volume(&self) -> &Volume {
        &self.lenders.volume
    }

    /// Returns the worker by which requests of operators and programs use the volume, one at a
    /// time.
    fn control_worker(&self) -> WorkerId {
        WorkerId(self.faults.workers + 1)
    }
}

fn bytes(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE_SIZE as u64..pages.end * PAGE_SIZE as u64
}
