//! Turns at waiting, for the threads that serve one queue.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::sleep;

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
    static TAKEN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// A request that comes so soon after its worker has begun to wait was there already, and others may be.
const AT_HAND: Duration = Duration::from_micros(10);

/// The turn to wait for the next request, which one worker has at a time.
///
/// A worker keeps it while it carries out a request, and takes the next one itself, as long as it need not sleep over it.
/// So with a lender that answers within the look-out of `fabric` one worker does everything, without waking another for
/// each request, over one connection whose other end is looking out too. A worker that is going to sleep passes the turn
/// on, and as many requests are under way as there are workers.
///
/// A worker that looks out for a reply does not sleep, and would serve requests that wait one after the other. So it passes its
/// turn on as soon as it has a request where requests come faster than they are served ([`begin`](Turn::begin)).
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

    /// To be called with a request, before it is carried out: where more of them wait, another worker may take the next.
    pub fn begin(&self) {
        if let Some(taken) = TAKEN.take() {
            self.begin_after(taken.elapsed());
        }
    }

    fn begin_after(&self, waited: Duration) {
        if waited < AT_HAND {
            self.pass_on();
        }
    }

    /// Waits until it is this worker's turn; at once where it still is.
    pub fn take(&self) {
        self.wait();
        TAKEN.set(Some(Instant::now()));
    }

    fn wait(&self) {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Whether another worker gets the turn while this one carries out a request that it got after so long.
    fn is_free_after(waited: Duration) -> bool {
        let turn = Arc::new(Turn::default());
        turn.take();
        turn.begin_after(waited);
        let (sender, taken) = mpsc::channel();
        let other = turn.clone();
        let worker = thread::spawn(move || {
            other.take();
            _ = sender.send(());
            other.pass_on();
        });
        let is_free = !turn.state().taken || taken.recv_timeout(Duration::from_millis(200)).is_ok();
        turn.pass_on();
        worker.join().unwrap();
        is_free
    }

    #[test]
    fn a_worker_keeps_its_turn_only_while_requests_come_one_by_one() {
        assert!(!is_free_after(AT_HAND));
        assert!(is_free_after(Duration::ZERO));
    }

    #[test]
    fn a_request_is_begun_once() {
        let turn = Turn::default();
        turn.begin();
        turn.take();
        assert!(turn.state().taken);
        turn.pass_on();
        assert!(!turn.state().taken);
    }
}
