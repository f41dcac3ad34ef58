//! Token that lets one thread at a time wait for the next request of a shared queue.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_page::lock;

use crate::sleep;

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
    static TAKEN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// A wait shorter than this means that the request was already queued, and that more may be.
const AT_HAND: Duration = Duration::from_micros(10);

/// Token to wait for the next request; one worker holds it at a time.
///
/// A worker keeps the token while it serves a request, and takes the next request itself, unless it
/// must sleep. If the lender answers before the spinning worker sleeps, one worker does everything
/// over one connection. No request then wakes another worker. A worker that is about to sleep
/// passes the token on. As many requests can thus be in flight as there are workers.
///
/// A worker that spins for a reply does not sleep, and would serve queued requests one after the
/// other. Where requests arrive faster than they are served, it therefore passes the token on once
/// it has a request ([`begin`](PollToken::begin)).
#[derive(Debug, Default)]
pub struct PollToken {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: bool,
    waiting: usize,
    /// Every worker may go on at once.
    over: bool,
}

impl PollToken {
    /// Registers this thread as a worker: it passes the token on before it sleeps.
    pub fn join(self: &Arc<Self>) {
        let token = self.clone();
        sleep::before_sleep(move || token.pass_on());
    }

    /// Passes the token on if the request was already queued, so that another worker can take the
    /// next one. Call it with each request, before serving the request.
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

    /// Waits until this worker holds the token or [`end`](Self::end) is called; returns at once if
    /// it already holds the token.
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

    /// Gives the token to another worker, if this thread holds the token.
    pub fn pass_on(&self) {
        if MINE.replace(false) {
            let mut state = self.state();
            state.taken = false;
            if state.waiting > 0 {
                self.free.notify_one();
            }
        }
    }

    /// Ends all waiting, present and future: [`take`](Self::take) returns at once.
    pub fn end(&self) {
        self.state().over = true;
        self.free.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Returns whether another worker gets the token while this one serves a request that came
    /// after `waited`.
    fn is_free_after(waited: Duration) -> bool {
        let token = Arc::new(PollToken::default());
        token.take();
        token.begin_after(waited);
        let (sender, taken) = mpsc::channel();
        let other = token.clone();
        let worker = thread::spawn(move || {
            other.take();
            _ = sender.send(());
            other.pass_on();
        });
        let is_free =
            !token.state().taken || taken.recv_timeout(Duration::from_millis(200)).is_ok();
        token.pass_on();
        worker.join().unwrap();
        is_free
    }

    #[test]
    fn a_worker_keeps_the_token_only_while_requests_come_one_by_one() {
        assert!(!is_free_after(AT_HAND));
        assert!(is_free_after(Duration::ZERO));
    }

    #[test]
    fn a_request_is_begun_once() {
        let token = PollToken::default();
        token.begin();
        token.take();
        assert!(token.state().taken);
        token.pass_on();
        assert!(!token.state().taken);
    }
}
