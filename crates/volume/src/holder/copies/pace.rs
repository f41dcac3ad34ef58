//! How long the reads of a copy take, and which of two copies to read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Of so many reads, one goes to the slower copy, to find out whether it still is.
const PROBE: u64 = 256;

/// Reads of a copy must take this many times as long before the other one is read instead.
const FACTOR: u64 = 2;

/// Differences below this, in nanoseconds, do not count: the first copy is read.
const LEAST: u64 = 200_000;

/// How long a read waits for a copy before it also asks the other: the least and the most, and how
/// many times the time that the faster copy takes.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(3), Duration::from_millis(100));
const LATE: u32 = 4;

/// A moving mean of the time that reads take.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    nanos: AtomicU64,
    reads: AtomicU64,
}

impl Pace {
    /// Notes a read. Each counts for an eighth.
    pub(super) fn note(&self, took: Duration) {
        let took = (took.as_nanos() as u64).max(1);
        let before = self.nanos.load(Ordering::Relaxed);
        let mean = if before == 0 { took } else { before - before / 8 + took / 8 };
        self.nanos.store(mean.max(1), Ordering::Relaxed);
    }

    /// Returns after what time the other copy is asked, too.
    pub(super) fn patience(&self, other: &Self) -> Duration {
        let of = |pace: &Self| Duration::from_nanos(pace.nanos.load(Ordering::Relaxed));
        // A lender that is late again and again does not make a read wait longer.
        (of(self).min(of(other)) * LATE).clamp(PATIENCE.0, PATIENCE.1)
    }

    /// Returns whether to read the other copy instead of the first one, which has this pace. Now
    /// and then it returns the other answer.
    pub(super) fn yields_to(&self, other: &Self) -> bool {
        let (own, others) =
            (self.nanos.load(Ordering::Relaxed), other.nanos.load(Ordering::Relaxed));
        let is_slow = others != 0 && own > others * FACTOR && own - others > LEAST;
        let is_probe = self.reads.fetch_add(1, Ordering::Relaxed) % PROBE == PROBE - 1;
        is_slow != is_probe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yields(first: &Pace, other: &Pace) -> usize {
        (0..PROBE).filter(|_| first.yields_to(other)).count()
    }

    #[test]
    fn the_first_copy_is_read_unless_it_is_much_slower() {
        let (first, other) = (Pace::default(), Pace::default());
        assert_eq!(yields(&first, &other), 1, "one read finds out about the other");
        other.note(Duration::from_micros(100));
        (0..50).for_each(|_| first.note(Duration::from_micros(250)));
        assert_eq!(yields(&first, &other), 1, "the difference is small");
        (0..50).for_each(|_| first.note(Duration::from_millis(5)));
        assert_eq!(yields(&first, &other), PROBE as usize - 1);
        (0..50).for_each(|_| first.note(Duration::from_micros(120)));
        assert_eq!(yields(&first, &other), 1, "it is fast again");
    }

    #[test]
    fn the_slower_copy_does_not_decide_when_a_read_is_late() {
        let (first, other) = (Pace::default(), Pace::default());
        assert_eq!(first.patience(&other), PATIENCE.0);
        first.note(Duration::from_secs(1));
        other.note(Duration::from_millis(5));
        assert_eq!(first.patience(&other), Duration::from_millis(5) * LATE);
        other.note(Duration::from_secs(10));
        assert_eq!(first.patience(&other), PATIENCE.1);
    }
}
