//! A thread that repeats work once per period; each round may take seconds.

use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

/// From the start of one round to the start of the next.
const PERIOD: Duration = Duration::from_secs(1);

/// A running background thread. Dropping this handle stops the thread after its current round.
#[derive(Debug)]
pub(crate) struct Background {
    /// The thread ends once this is closed.
    _runs: mpsc::Sender<Infallible>,
}

impl Background {
    /// Starts a thread that calls `work` once per period.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(crate) fn start<S: Send + 'static>(
        name: &str,
        mut state: S,
        work: impl Fn(&mut S) + Send + 'static,
    ) -> io::Result<Self> {
        Self::spawn(name, move |runs| {
            loop {
                let next = Instant::now() + PERIOD;
                work(&mut state);
                let rest = next.saturating_duration_since(Instant::now());
                if runs.recv_timeout(rest) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
            }
        })
    }

    /// Starts a thread that calls `work` once per period. Between rounds it calls `rest`, which
    /// blocks up to the given time; the next round starts when it returns.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(crate) fn start_with_rest<S: Send + 'static>(
        name: &str,
        mut state: S,
        work: impl Fn(&mut S) + Send + 'static,
        rest: impl Fn(&mut S, Duration) + Send + 'static,
    ) -> io::Result<Self> {
        Self::spawn(name, move |runs| {
            while runs.try_recv() != Err(TryRecvError::Disconnected) {
                let next = Instant::now() + PERIOD;
                work(&mut state);
                rest(&mut state, next.saturating_duration_since(Instant::now()));
            }
        })
    }

    fn spawn(
        name: &str,
        run: impl FnOnce(mpsc::Receiver<Infallible>) + Send + 'static,
    ) -> io::Result<Self> {
        let (_runs, ends) = mpsc::channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || run(ends))?;
        Ok(Self { _runs })
    }
}
