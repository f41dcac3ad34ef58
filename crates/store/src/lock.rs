//! A lock and a stored bit for each page, in four bytes.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

/// The page is stored; without this bit it is a hole and reads as zeroes.
const STORED: u32 = 1 << 31;
/// A thread holds the page for writing and may change [`STORED`].
const WRITER: u32 = 1 << 30;
/// A thread sleeps until the page is free. Set only while the page is held.
const WAITING: u32 = 1 << 29;
/// Number of readers.
const READERS: u32 = WAITING - 1;

/// Polls before sleeping: about as long as the copy of a page takes.
const SPINS: u32 = 100;

/// The state of a page, 4 bytes: whether it is stored, and a readers-writer lock over that bit and
/// the contents.
///
/// A reader that arrives while a thread waits queues behind that thread, so constant readers cannot
/// starve a writer. For that reason a thread that holds a page MUST only wait for pages with higher
/// numbers, and otherwise use [`try_read`](Self::try_read).
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct PageState(AtomicU32);

impl PageState {
    /// Returns whether the page is stored; stable only while the caller holds the page.
    pub(crate) fn stored(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STORED != 0
    }

    /// Returns whether the page is a hole that no thread holds. Sequentially consistent, see
    /// [`Lease::retire`](crate::lease::Lease::retire).
    pub(crate) fn is_idle_hole(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Locks the page for reading if it need not wait.
    pub(crate) fn try_read(&self) -> bool {
        let free = |state| (state & (WRITER | WAITING) == 0).then_some(state + 1);
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, free).is_ok()
    }

    /// Locks the page for reading.
    pub(crate) fn read(&self) {
        self.acquire(WRITER | WAITING, 1);
    }

    /// Locks the page for writing.
    pub(crate) fn write(&self) {
        self.acquire(WRITER | READERS, WRITER);
    }

    fn acquire(&self, blockers: u32, mark: u32) {
        let mut spins = 0;
        loop {
            let state = self.0.load(Ordering::Relaxed);
            if state & blockers == 0 {
                let taken = self.0.compare_exchange_weak(
                    state,
                    state + mark,
                    Ordering::SeqCst,
                    Ordering::Relaxed,
                );
                if taken.is_ok() {
                    return;
                }
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                self.sleep(state);
            }
        }
    }

    /// Sleeps until the page is free, or returns at once if the state is no longer `seen`.
    fn sleep(&self, seen: u32) {
        let waiting = seen | WAITING;
        if self.0.compare_exchange(seen, waiting, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // A spurious return and a changed state need no distinction: the caller polls again.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, waiting, None);
        }
    }

    /// Ends a read.
    pub(crate) fn unlock_read(&self) {
        let leave = |state: u32| {
            let left = state - 1;
            Some(if left & READERS == 0 { left & !WAITING } else { left })
        };
        let before =
            self.0.fetch_update(Ordering::Release, Ordering::Relaxed, leave).unwrap_or_default();
        if before & WAITING != 0 && before & READERS == 1 {
            self.wake();
        }
    }

    /// Sets whether the page is stored; the caller holds it for writing.
    pub(crate) fn set_stored(&self, stored: bool) {
        if stored {
            self.0.fetch_or(STORED, Ordering::Relaxed);
        } else {
            self.0.fetch_and(!STORED, Ordering::Relaxed);
        }
    }

    /// Ends a write.
    pub(crate) fn unlock_write(&self) {
        let before = self.0.fetch_and(!(WRITER | WAITING), Ordering::Release);
        if before & WAITING != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Wakes all of them: readers can proceed together, and a thread that loses the race sleeps
        // again.
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, i32::MAX.cast_unsigned());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::*;

    #[test]
    fn a_page_has_many_readers_or_one_writer() {
        let state = PageState::default();
        assert!(state.try_read());
        assert!(state.try_read());
        state.unlock_read();
        state.unlock_read();
        state.write();
        assert!(!state.try_read());
        state.set_stored(true);
        state.unlock_write();
        assert!(state.try_read());
        assert!(state.stored());
    }

    #[test]
    fn writers_exclude_everybody_and_nobody_sleeps_for_ever() {
        let state = PageState::default();
        let (a, b) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for n in 0..20_000 {
                        state.write();
                        let value = a.load(Ordering::Relaxed) + 1;
                        a.store(value, Ordering::Relaxed);
                        if n % 64 == 0 {
                            thread::yield_now();
                        }
                        b.store(value, Ordering::Relaxed);
                        state.unlock_write();
                    }
                });
                scope.spawn(|| {
                    for n in 0..20_000 {
                        state.read();
                        let seen = a.load(Ordering::Relaxed);
                        if n % 64 == 0 {
                            thread::yield_now();
                        }
                        assert_eq!(seen, b.load(Ordering::Relaxed));
                        state.unlock_read();
                    }
                });
            }
        });
        assert_eq!(a.into_inner(), 40_000);
        assert!(state.is_idle_hole());
    }
}
