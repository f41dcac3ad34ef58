//! Work on a thread of its own, period by period, which may take seconds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A period.
const PERIOD: Duration = Duration::from_secs(1);

/// How often it is seen that it is to end.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);

/// Work that goes on. Dropping it has it end after what it is about.
#[derive(Debug)]
pub(crate) struct Background(Arc<AtomicBool>);

impl Background {
    /// Starts a thread that does `work` each period, and then `rest`s for moments until the next one, or until that says that there is something to do.
    ///
    /// # Errors
    /// If there can be no thread.
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
