//! The rate of this machine's time stamp counter.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use crate::sys;

/// How long a measurement takes: long enough for an accuracy of a thousandth.
const MEASURE_TIME: Duration = Duration::from_millis(50);

/// Number of readings; the tightest counts, because another thread may run in the middle of one.
const READINGS_PER_MEASUREMENT: u32 = 20;

/// Returns the counter's ticks in a millisecond. An emulated guest counts with the same counter,
/// and its kernel measures it against an emulated timer. On a busy machine QEMU is late with that
/// timer. The kernel then takes the counter for too slow, and its clock runs many times too fast.
pub(crate) fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let before = reading();
        thread::sleep(MEASURE_TIME);
        let after = reading();
        let nanoseconds = after.1.duration_since(before.1).as_nanos().max(1);
        u64::try_from(u128::from(after.0.saturating_sub(before.0)) * 1_000_000 / nanoseconds)
            .unwrap_or(u64::MAX)
    })
}

/// Returns the counter and the time of its reading.
fn reading() -> (u64, Instant) {
    let once = |_| {
        let before = sys::time_stamp();
        let at = Instant::now();
        let after = sys::time_stamp();
        (after.saturating_sub(before), (before + (after.saturating_sub(before)) / 2, at))
    };
    (0..READINGS_PER_MEASUREMENT)
        .map(once)
        .min_by_key(|(width, _)| *width)
        .map_or_else(|| once(0).1, |(_, tightest)| tightest)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_counter_counts_and_its_rate_is_measured_once() {
        let khz = super::khz();
        assert!(khz > 0 && khz == super::khz(), "{khz}");
    }
}
