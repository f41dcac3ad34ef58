//! What an engine counts and times.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::lock;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Pages, faults and times since the engine started.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            fetches: Mutex<Times>,
        }

        impl Counters {
            pub(crate) fn counts(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Faults on pages that were never written, or discarded: no one was asked.
    zero_faults,
    /// Faults on pages that had to be fetched.
    remote_faults,
    /// Faults on pages that were still in the cache: touched again after they were named as victims.
    second_chances,
    /// Faults that another thread's had settled already.
    late_faults,
    /// Faults that could not be served, and are tried again.
    stalled_faults,
    /// Faults that waited too long, and were answered by `SIGBUS`.
    given_up,
    /// Pages that left the cache.
    evicted,
    /// Pages that were written to the volume.
    written_back,
    /// Pages that were to be written and held only zeroes.
    found_zero,
    /// Pages that were fetched before they were touched.
    prefetched,
    /// Of these, such as were touched then, as far as that is known: it was as good as the pattern went on just behind them.
    prefetch_used,
    /// Of these, such as left the cache without that.
    prefetch_wasted,
    /// Pages of zeroes that were there before they were touched.
    zeroed,
    /// Nanoseconds that remote faults took, all together.
    remote_ns,
    /// Of these, how many the link took, the lender's part among them.
    link_ns,
    /// Of these, how many they waited for a frame: for pages that had to leave first (Disaggregation's non-overlapped eviction).
    room_ns,
    /// Pages that programs discarded.
    discarded,
    /// Pages that came to be shared with others of the group.
    merged,
    /// Pages of zeroes that were found before they left, and take nothing since.
    zero_merged,
    /// Pages that were shared until somebody wrote to them.
    broken,
}

/// How long remote faults took, from when the engine knew of them until the page was there.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        // From 100 ns to 100 s in steps of 1 %.
        Self(Histogram::new_with_bounds(100, 100_000_000_000, 2).expect("the bounds are in order"))
    }
}

impl Times {
    pub(crate) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// How many took longer than `from`, and up to `to`.
    pub fn between(&self, from: Duration, to: Duration) -> u64 {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.count_between(nanos(from) + 1, nanos(to))
    }

    /// The time that this share of them took at most, as 0.5 for half.
    pub fn at(&self, share: f64) -> Duration {
        Duration::from_nanos(self.0.value_at_quantile(share))
    }
}

impl Counters {
    pub(crate) fn fetched(&self, time: Duration) {
        self.remote_faults.fetch_add(1, Ordering::Relaxed);
        took(&self.remote_ns, time);
        lock(&self.fetches).record(time);
    }

    pub(crate) fn times(&self) -> Times {
        lock(&self.fetches).clone()
    }
}

pub(crate) fn took(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

pub(crate) fn add(counter: &AtomicU64, number: usize) {
    counter.fetch_add(number as u64, Ordering::Relaxed);
}
