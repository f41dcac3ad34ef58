//! A link that is slower than the real one, for experiments (\[Lim12\], section 3, emulates its
//! link).

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_transport::sleep::going_to_sleep;
use serde::{Deserialize, Serialize};

use crate::counters::Times;
use crate::lock;

/// The properties of an emulated link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// How long a page is in flight, in either direction.
    pub latency: Duration,
    /// A page starts only after the arrival of the one before. If false, any number of pages is in
    /// flight together.
    pub one_at_a_time: bool,
}

/// How long before the due time the thread polls the clock, as a sleeping thread wakes late.
const LOOK_OUT: Duration = Duration::from_micros(150);

#[derive(Debug)]
pub(super) struct Link {
    spec: LinkSpec,
    free_from: Mutex<Option<Instant>>,
    /// The times of fetches; pages fetched together count once.
    took: Mutex<Times>,
}

impl Link {
    pub(super) fn new(spec: LinkSpec) -> Self {
        Self { spec, free_from: Mutex::default(), took: Mutex::default() }
    }

    /// Records how long a fetch took.
    pub(super) fn note(&self, time: Duration) {
        lock(&self.took).record(time);
    }

    pub(super) fn took(&self) -> Times {
        lock(&self.took).clone()
    }

    /// Waits until pages that were sent together have arrived, and returns that time.
    pub(super) fn carry(&self, pages: usize, sent: Instant) -> Instant {
        let LinkSpec { latency, one_at_a_time } = self.spec;
        let due = if one_at_a_time {
            let mut free_from = lock(&self.free_from);
            let starts = free_from.map_or(sent, |free_from| free_from.max(sent));
            *free_from.insert(starts + latency * pages as u32)
        } else {
            sent + latency
        };
        let left = due.saturating_duration_since(Instant::now());
        if left > LOOK_OUT {
            going_to_sleep();
            thread::sleep(left - LOOK_OUT);
        }
        // No pause: a look at the clock takes as long, and a delay of 4 us must be exact to 40 ns.
        loop {
            let now = Instant::now();
            if now >= due {
                return now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how long three pages take that are sent at once.
    fn three(latency: Duration, one_at_a_time: bool) -> Duration {
        let link = Link::new(LinkSpec { latency, one_at_a_time });
        let sent = Instant::now();
        (0..3).for_each(|_| _ = link.carry(1, sent));
        sent.elapsed()
    }

    #[test]
    fn pages_arrive_when_they_are_due_and_not_before() {
        for latency in [Duration::from_micros(4), Duration::from_millis(2)] {
            assert!(three(latency, true) >= 3 * latency);
            let together = three(latency, false);
            assert!(together >= latency, "{together:?}");
        }
    }
}
