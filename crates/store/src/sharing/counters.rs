//! Counters of a group's frames.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_page::{Bytes, PAGE_SIZE};

use crate::SharedUsage;

/// Counters of the use of a group's frames. Each is exact; read while a thread writes, two of them
/// may differ by a page.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Pages that refer to a frame.
    pub(super) references: Counter,
    /// Frames to which pages refer.
    pub(super) frames: Counter,
    /// Frames to which more than one page refers.
    pub(super) shared: Counter,
    /// Frames that have RAM.
    pub(super) populated: Counter,
    /// Copy-on-write breaks.
    pub(super) breaks: Counter,
}

impl Counters {
    pub(super) fn usage(&self) -> SharedUsage {
        let bytes = |pages: u64| Bytes(pages * PAGE_SIZE as u64);
        let (references, frames) = (self.references.get(), self.frames.get());
        SharedUsage {
            stored: bytes(references),
            taken: bytes(self.populated.get()),
            saved: bytes(references.saturating_sub(frames)),
            shared_frames: self.shared.get(),
            breaks: self.breaks.get(),
        }
    }
}

/// A number that threads change and read without a lock.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, many: usize) {
        self.0.fetch_add(many as u64, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, many: usize) {
        self.0.fetch_sub(many as u64, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
