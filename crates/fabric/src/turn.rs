//! Turns at waiting, for the threads that serve one queue.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::sleep;

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
}

/// The turn to wait for the next request, which one worker has at a time.
///
/// A worker keeps it while it carries out a request, and takes the next one itself, as long as it need not sleep over it.
/// So with a lender that answers within the look-out of `fabric` one worker does everything, without waking another for
/// each request, over one connection whose other end is looking out too. A worker that is going to sleep passes the turn
/// on, and as many requests are under way as there are workers.
#[derive(Debug, Default)]
pub struct Turn {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: bool,
    waiting: usize,
    /// Everybody may go on at once.
    over: bool,
}

impl Turn {
    /// Makes this thread one of the workers: it passes its turn on before it sleeps.
    pub fn join(self: &Arc<Self>) {
        let turn = self.clone();
        sleep::before_sleep(move || turn.pass_on());
    }

    /// Waits until it is this worker's turn; at once where it still is.
    pub fn take(&self) {
        if MINE.get() {
            return;
        }
        let mut state = self.state();
        while state.taken && !state.over {
            state.waiting += 1;
            state = self.free.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.taken = true;
        MINE.set(true);
    }

    /// Gives the turn to another worker, where it is this one's.
    pub fn pass_on(&self) {
        if MINE.replace(false) {
            let mut state = self.state();
            state.taken = false;
            if state.waiting > 0 {
                self.free.notify_one();
            }
        }
    }

    /// Ends all waiting, now and from now on: there is nothing more to wait for.
    pub fn end(&self) {
        self.state().over = true;
        self.free.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
