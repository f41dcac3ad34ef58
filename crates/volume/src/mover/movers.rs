//! Which threads move extents now: several, an extent each, or one alone.

use std::array;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use aquifer_page::WorkerId;

use super::copy::buffer;
use crate::lock_any;

/// The most extents that move at a time: while one is read, another is written.
pub(super) const MOVERS: usize = 2;

/// The turns of threads that move extents of a volume.
#[derive(Debug)]
pub(crate) struct Movers {
    turns: RwLock<()>,
    buffers: [Mutex<Box<[u8]>>; MOVERS],
    /// The number of threads that wait for a turn and must not wait long.
    hurried: AtomicUsize,
}

/// A thread's turn to move an extent while others move other ones. The buffer is for its pages.
pub(super) struct Beside<'a> {
    _turn: RwLockReadGuard<'a, ()>,
    pub(super) buffer: MutexGuard<'a, Box<[u8]>>,
}

/// A thread's turn alone.
pub(super) struct Alone<'a> {
    _turn: RwLockWriteGuard<'a, ()>,
    pub(super) buffer: MutexGuard<'a, Box<[u8]>>,
}

impl Movers {
    pub(crate) fn new() -> Self {
        Self {
            turns: RwLock::new(()),
            buffers: array::from_fn(|_| Mutex::new(buffer())),
            hurried: AtomicUsize::new(0),
        }
    }

    /// Waits for a turn beside at most [`MOVERS`] - 1 others. A background move stops for this.
    pub(super) fn beside(&self) -> Beside<'_> {
        self.hurry(|| {
            let turn = self.turns.read().unwrap_or_else(PoisonError::into_inner);
            Beside { _turn: turn, buffer: self.buffer() }
        })
    }

    /// Waits until no other extent moves. A background move stops for this.
    pub(super) fn alone(&self) -> Alone<'_> {
        self.hurry(|| {
            let turn = self.turns.write().unwrap_or_else(PoisonError::into_inner);
            Alone { _turn: turn, buffer: self.buffer() }
        })
    }

    /// Takes a turn alone if no other extent moves.
    pub(super) fn try_alone(&self) -> Option<Alone<'_>> {
        self.turns.try_write().ok().map(|turn| Alone { _turn: turn, buffer: self.buffer() })
    }

    /// Returns whether another thread waits for the one that moves an extent in the background.
    pub(super) fn are_hurried(&self) -> bool {
        self.hurried.load(Ordering::Relaxed) > 0
    }

    fn hurry<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.hurried.fetch_add(1, Ordering::Relaxed);
        let turn = wait();
        self.hurried.fetch_sub(1, Ordering::Relaxed);
        turn
    }

    fn buffer(&self) -> MutexGuard<'_, Box<[u8]>> {
        lock_any(&self.buffers, WorkerId(0))
    }
}
