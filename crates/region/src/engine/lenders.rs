//! The lenders' side of an engine: the volume, and the state that goes with it.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use aquifer_volume::{Event, Happening, Upkeep, Volume};

use super::link::Link;
use crate::extent_map::ExtentMap;

/// The pages' way to the lenders and back.
#[derive(Debug)]
pub(super) struct Lenders {
    pub(super) volume: Arc<Volume>,
    /// The places of the volume's extents, kept for the next engine.
    pub(super) extent_map: Arc<ExtentMap>,
    pub(super) link: Option<Link>,
    /// The thread that reconnects to lost lenders, while this engine runs.
    pub(super) upkeep: Mutex<Option<Upkeep>>,
    /// Pages that an earlier engine was about to discard, and that lenders may still have.
    pub(super) leftovers: Mutex<Vec<Range<u64>>>,
}

/// Logs lost and recovered lenders. The engine itself reports a lost page to its programs.
pub(super) fn log(event: &Event) {
    match event.what {
        Happening::LenderLost { .. } => tracing::error!("{}", event.what),
        Happening::CopyBehind { .. } | Happening::DiskCopiesPaused { .. } => {
            tracing::warn!("{}", event.what);
        }
        Happening::LenderBack { .. }
        | Happening::CopiesWhole { .. }
        | Happening::DiskCopiesResumed => tracing::info!("{}", event.what),
        Happening::PageLost { .. } | Happening::SpillStarted | Happening::SpillEnded => {}
    }
}

/// Returns how many threads use the volume at a time.
pub(super) fn volume_workers(workers: usize) -> usize {
    workers + 2
}
