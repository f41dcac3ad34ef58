//! A link that is slower than the real one, to ask "what if" (Disaggregation, section 6: its figures are of emulated links).

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_fabric::sleep::going_to_sleep;
use serde::{Deserialize, Serialize};

use crate::counters::Times;
use crate::lock;

/// What a link is to be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// How long a page takes, either way.
    pub latency: Duration,
    /// A page starts only when the one before has arrived. Else any number of pages is on its way at a time.
    pub one_at_a_time: bool,
}

/// How long before it is due a page's arrival is looked out for without sleeping: a sleeper wakes late.
const LOOK_OUT: Duration = Duration::from_micros(150);

#[derive(Debug)]
pub(super) struct Link {
    spec: LinkSpec,
    free_from: Mutex<Option<Instant>>,
    /// How long it took what was fetched at a time.
    took: Mutex<Times>,
}

impl Link {
    pub(super) fn new(spec: LinkSpec) -> Self {
        Self { spec, free_from: Mutex::default(), took: Mutex::default() }
    }

    /// Notes how long a fetch took.
    pub(super) fn note(&self, time: Duration) {
        lock(&self.took).record(time);
    }

    pub(super) fn took(&self) -> Times {
        lock(&self.took).clone()
    }

    /// Returns when pages that were sent at a time have arrived, and says when that was.
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
        // Looking at the clock takes as long as a pause would, and a delay of 4 us is to be right to 40 ns.
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

    /// How long three pages take that are sent at once.
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
