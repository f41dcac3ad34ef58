//! A reader-writer lock whose holder can let the waiting threads go first.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_transport::sleep::going_to_sleep;

/// How often a thread looks whether the threads before it have the lock.
const LOOK: Duration = Duration::from_micros(50);

/// How long a thread lets others go first. Further ones may come without end.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// A lock for a thread that locks again and again, such as the mover of an extent.
///
/// [`RwLock`] wakes the waiting threads when it is unlocked, and does not reserve itself for them.
/// Such a thread would have it again before they run, and they could wait until it stops.
///
/// Poison is ignored: no panic leaves what it guards half changed.
#[derive(Debug)]
pub(crate) struct FairLock<T> {
    lock: RwLock<T>,
    /// The number of threads that sleep until they have the lock.
    waiting: AtomicU32,
}

impl<T> FairLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { lock: RwLock::new(value), waiting: AtomicU32::new(0) }
    }

    /// Locks for reading. Calls [`going_to_sleep`] only if this thread must wait.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        match self.lock.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.wait(|| self.lock.read().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Locks for writing. Calls [`going_to_sleep`] only if this thread must wait.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        match self.lock.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.wait(|| self.lock.write().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Locks for reading if no thread holds the lock for writing.
    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        match self.lock.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until the threads that wait for the lock have it, or for [`LONGEST_WAIT`]. The caller
    /// must not hold it.
    pub(crate) fn let_waiting_in(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        going_to_sleep();
        let began = Instant::now();
        while self.waiting.load(Ordering::Relaxed) > 0 && began.elapsed() < LONGEST_WAIT {
            thread::sleep(LOOK);
        }
    }

    fn wait<G>(&self, lock: impl FnOnce() -> G) -> G {
        going_to_sleep();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_thread_has_the_lock_before_its_holder_has_it_again() {
        let lock = FairLock::new(0);
        for round in 0..200 {
            thread::scope(|scope| {
                let mut value = lock.write();
                *value = round;
                let reader = scope.spawn(|| *lock.read());
                while lock.waiting.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                drop(value);
                lock.let_waiting_in();
                *lock.write() = u32::MAX;
                assert_eq!(reader.join().unwrap(), round);
            });
        }
    }
}
