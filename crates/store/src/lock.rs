use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

/// The page is in the file and holds data; without it the page is a hole and reads as zeroes.
const STORED: u32 = 1 << 31;
/// Somebody writes the page or changes [`STORED`].
const WRITER: u32 = 1 << 30;
/// Somebody sleeps until the page is free. Only ever set while the page is held.
const WAITING: u32 = 1 << 29;
/// How many read the page.
const READERS: u32 = WAITING - 1;

/// How often to look again before going to sleep: about as long as copying a page takes.
const SPINS: u32 = 100;

/// Four bytes a page: whether it is stored, and a readers-writer lock over that and its contents.
///
/// A reader that comes while somebody waits queues behind, so a page that is read all the time can still be written.
/// For that reason, who holds one page MUST only wait for pages with a higher number, and otherwise use
/// [`try_read`](Self::try_read).
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct PageState(AtomicU32);

impl PageState {
    /// Whether the page is stored; meaningful to who holds it.
    pub(crate) fn stored(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STORED != 0
    }

    /// Whether at this moment the page is a hole that nobody holds. Sequentially consistent, see
    /// [`Lease::retire`](crate::lease::Lease::retire).
    pub(crate) fn is_idle_hole(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Takes the page for reading if that needs no waiting.
    pub(crate) fn try_read(&self) -> bool {
        let free = |state| (state & (WRITER | WAITING) == 0).then_some(state + 1);
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, free).is_ok()
    }

    /// Takes the page for reading.
    pub(crate) fn read(&self) {
        self.acquire(WRITER | WAITING, 1);
    }

    /// Takes the page for writing.
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

    /// Sleeps until the page is free, or not at all if its state is no longer `seen`.
    fn sleep(&self, seen: u32) {
        let waiting = seen | WAITING;
        if self.0.compare_exchange(seen, waiting, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // Spurious returns and a state that has moved on are the same to the caller: it looks again.
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

    /// Changes whether the page is stored, by who holds it for writing.
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
        // All of them: readers can go on together, and who loses the race sleeps again.
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
