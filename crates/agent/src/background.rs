//! A thread that repeats work once per period; each round may take seconds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// From the start of one round to the start of the next.
const PERIOD: Duration = Duration::from_secs(1);

/// The longest that one `rest` may block: between two rests the thread checks whether it must stop.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);

/// A running background thread. Dropping this handle stops the thread after its current round.
#[derive(Debug)]
pub(crate) struct Background(Arc<AtomicBool>);

impl Background {
    /// Starts a thread that calls `work` once per period. Between rounds it calls `rest`, which
    /// blocks briefly and returns true to start the next round early.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(crate) fn start<S: Send + 'static>(
        name: &str,
        mut state: S,
        work: impl Fn(&mut S) + Send + 'static,
        rest: impl Fn(&mut S) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let end = ends.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let goes_on = || !end.load(Ordering::Relaxed);
            while goes_on() {
                let next = Instant::now() + PERIOD;
                work(&mut state);
                while Instant::now() < next && goes_on() && !rest(&mut state) {}
            }
        })?;
        Ok(Self(ends))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
