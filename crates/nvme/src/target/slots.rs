//! A semaphore for costly work, which must leave some processors free.

use std::num::NonZero;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aquifer_page::lock;

/// The number of free slots for work, and the condition that one becomes free.
#[derive(Debug)]
pub(super) struct Slots {
    free: Mutex<usize>,
    freed: Condvar,
}

impl Slots {
    /// Makes as many slots as half of the processors, rounded up.
    pub(super) fn new() -> Self {
        Self::of(thread::available_parallelism().map_or(1, NonZero::get).div_ceil(2))
    }

    fn of(count: usize) -> Self {
        Self { free: Mutex::new(count), freed: Condvar::new() }
    }

    /// Does the work once a slot is free; `None` if none becomes free within `io_timeout`.
    pub(super) fn work<T>(&self, io_timeout: Duration, work: impl FnOnce() -> T) -> Option<T> {
        let free = lock(&self.free);
        let waited = self.freed.wait_timeout_while(free, io_timeout, |free| *free == 0);
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(1)?;
        drop(free);
        let _slot = Slot(self);
        Some(work())
    }
}

/// A taken slot, freed on drop.
struct Slot<'a>(&'a Slots);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *lock(&self.0.free) += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn no_more_work_is_done_at_a_time_than_there_are_slots() {
        let (slots, begun, done) = (Slots::of(2), Barrier::new(3), Barrier::new(3));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    slots.work(LONG, || {
                        begun.wait();
                        done.wait();
                    })
                });
            }
            begun.wait();
            assert_eq!(slots.work(Duration::ZERO, || ()), None);
            done.wait();
            assert_eq!(slots.work(LONG, || 7), Some(7));
        });
    }
}
