//! The counts and times of an engine.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::lock;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of pages and faults, and times in nanoseconds, since the engine started.
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
    /// Faults on pages that were never written or were discarded, and needed no lender.
    zero_faults,
    /// Faults on pages that had to be fetched.
    remote_faults,
    /// Faults on pages that were still in the cache: touched again after they were named as
    /// victims.
    second_chances,
    /// Faults that another thread's fault had already resolved, or was resolving.
    late_faults,
    /// Faults that could not be served, and are retried.
    stalled_faults,
    /// Faults that timed out, and ended in `SIGBUS`.
    given_up,
    /// Pages evicted from the cache.
    evicted,
    /// Pages written to the volume.
    written_back,
    /// Dirty pages that held only zeroes, and so were not written.
    found_zero,
    /// Pages fetched before they were touched.
    prefetched,
    /// Prefetched pages that were touched later, as far as is known. A guess counts as right if the
    /// pattern continued just behind it.
    prefetch_used,
    /// Prefetched pages that left the cache without a known touch.
    prefetch_wasted,
    /// Pages of zeroes that were mapped before they were touched.
    zeroed,
    /// Nanoseconds of all remote faults together.
    remote_ns,
    /// Nanoseconds of these on the link, including the lender's part.
    link_ns,
    /// Nanoseconds of these spent waiting for a frame, while other pages left: the non-overlapped
    /// eviction of \[Lim12\], section 4.
    room_ns,
    /// Pages that programs discarded.
    discarded,
    /// Pages that were merged with a frame of the group.
    merged,
    /// Pages of zeroes that the scanner found, and that take no memory since.
    zero_merged,
    /// Shared pages that were unshared by a write.
    cow_breaks,
}

/// The distribution of the times of remote faults, from the engine's notice until the page was
/// mapped.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        // From 100 ns to 100 s, with two significant digits (1 %).
        Self(Histogram::new_with_bounds(100, 100_000_000_000, 2).expect("the bounds are in order"))
    }
}

impl Times {
    pub(crate) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns the number of times longer than `from`, up to and including `to`.
    pub fn between(&self, from: Duration, to: Duration) -> u64 {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.count_between(nanos(from) + 1, nanos(to))
    }

    /// Returns the time that this share of the faults did not exceed; 0.5 gives the median.
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
