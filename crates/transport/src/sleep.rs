//! Callback that runs before a thread goes to sleep.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

thread_local! {
    static BEFORE: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Registers `call` to run whenever this thread is about to wait for a peer, a disk or another
/// thread.
///
/// Replaces the thread's previous callback. `call` must be quick and must not wait. It is for
/// threads that share a [`PollToken`](crate::poll_token::PollToken): a worker that need not sleep
/// keeps it, which saves a wake-up.
pub fn before_sleep(call: impl Fn() + 'static) {
    BEFORE.set(Some(Box::new(call)));
}

/// Runs this thread's callback. Call it each time before the thread waits; without a callback it
/// costs nothing.
pub fn going_to_sleep() {
    // A thread that is ending has already dropped its callback.
    let _ = BEFORE.try_with(|before| {
        if let Some(call) = &*before.borrow() {
            call();
        }
    });
}

/// Locks the mutex, and ignores poison: for data that no panic leaves half changed. Calls
/// [`going_to_sleep`] only if another thread holds the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => return guard,
        Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => going_to_sleep(),
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
