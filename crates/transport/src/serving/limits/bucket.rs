//! Token bucket with debt: a request passes while any token is left, whatever it costs.

use std::time::Duration;

use aquifer_page::PAGE_SIZE;

/// Time in which an idle bucket fills.
const BURST: Duration = Duration::from_millis(100);
/// Billionths of a token in a token.
const NANO: i128 = 1_000_000_000;

/// Tokens that time refills and requests take.
///
/// A bucket that lends tokens needs no burst as large as the largest request. Over any time it
/// gives at most its burst, the rate times the time, and one request.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// Tokens a second; at least 1.
    rate: u64,
    /// Billionths of a token; negative while in debt.
    nanos: i128,
    /// When `nanos` was right.
    at: Duration,
}

impl Bucket {
    /// Makes a full bucket of `rate` tokens a second.
    pub(super) fn new(rate: u64, now: Duration) -> Self {
        let rate = rate.max(1);
        let full = Self { rate, nanos: 0, at: now };
        Self { nanos: full.burst(), ..full }
    }

    /// Returns the most that an idle bucket holds, in billionths: at least a token.
    fn burst(&self) -> i128 {
        (i128::from(self.rate) * BURST.as_nanos() as i128).max(NANO)
    }

    /// Returns the time until a request may pass; zero if one may now.
    pub(super) fn wait(&mut self, now: Duration) -> Duration {
        self.refill(now);
        if self.nanos > 0 {
            return Duration::ZERO;
        }
        let nanos = -self.nanos / i128::from(self.rate) + 1;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Takes tokens, into debt if need be.
    pub(super) fn take(&mut self, tokens: u64) {
        self.nanos -= i128::from(tokens) * NANO;
    }

    /// Returns the time in which time refills this many tokens.
    pub(super) fn time_for(&self, tokens: u64) -> Duration {
        let nanos = i128::from(tokens) * NANO / i128::from(self.rate);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Sets the rate. A debt stays, and a balance shrinks to the new burst.
    pub(super) fn set_rate(&mut self, rate: u64, now: Duration) {
        self.refill(now);
        self.rate = rate.max(1);
        self.nanos = self.nanos.min(self.burst());
    }

    /// Returns whether the bucket has forgotten all that it gave.
    pub(super) fn is_full(&mut self, now: Duration) -> bool {
        self.refill(now);
        self.nanos == self.burst()
    }

    /// Returns what the bucket gives in a millisecond.
    pub(super) fn per_millisecond(&self) -> u64 {
        self.rate / 1000
    }

    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_nanos() as i128;
        self.at = self.at.max(now);
        self.nanos = (self.nanos + passed * i128::from(self.rate)).min(self.burst());
    }
}

/// Converts requests to the bytes that they would carry as single pages.
pub(super) fn as_pages(requests: u64) -> u64 {
    requests.saturating_mul(PAGE_SIZE as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_request_passes_while_a_token_is_left() {
        let mut bucket = Bucket::new(1000, Duration::ZERO);
        bucket.take(99);
        assert_eq!(bucket.wait(Duration::ZERO), Duration::ZERO, "one token is left");
        bucket.take(1001);
        assert_eq!(bucket.wait(Duration::ZERO), MS * 1000 + Duration::from_nanos(1));
        assert_eq!(bucket.wait(MS * 1001), Duration::ZERO);
    }

    #[test]
    fn idle_time_fills_no_more_than_a_burst() {
        let mut bucket = Bucket::new(1000, Duration::ZERO);
        bucket.take(100);
        assert!(!bucket.is_full(MS * 99));
        assert!(bucket.is_full(MS * 100));
        bucket.refill(MS * 5000);
        bucket.take(100);
        assert!(bucket.wait(MS * 5000) > Duration::ZERO);
    }

    #[test]
    fn a_slow_bucket_still_holds_a_token() {
        let mut bucket = Bucket::new(1, Duration::ZERO);
        assert_eq!(bucket.wait(Duration::ZERO), Duration::ZERO);
        bucket.take(2);
        assert!(bucket.wait(MS * 999) > Duration::ZERO);
        assert_eq!(bucket.wait(MS * 1001), Duration::ZERO);
    }

    #[test]
    fn a_new_rate_keeps_the_debt() {
        let mut bucket = Bucket::new(1000, Duration::ZERO);
        bucket.take(1100);
        bucket.set_rate(10_000, Duration::ZERO);
        assert_eq!(bucket.wait(Duration::ZERO), MS * 100 + Duration::from_nanos(1));
    }

    proptest! {
        #[test]
        fn no_sequence_gets_more_than_rate_and_burst(
            rate in 1u64..10_000_000,
            steps in prop::collection::vec((0u64..200_000, 1u64..100_000), 1..200),
        ) {
            let mut bucket = Bucket::new(rate, Duration::ZERO);
            let (mut now, mut given, mut largest) = (Duration::ZERO, 0u64, 0u64);
            for (micros, tokens) in steps {
                now += Duration::from_micros(micros);
                let wait = bucket.wait(now);
                if wait.is_zero() {
                    bucket.take(tokens);
                    (given, largest) = (given + tokens, largest.max(tokens));
                } else {
                    let mut later = bucket.clone();
                    prop_assert!(later.wait(now + wait).is_zero(), "the wait is long enough");
                    let mut early = bucket.clone();
                    let almost = wait.saturating_sub(Duration::from_nanos(2));
                    prop_assert!(!early.wait(now + almost).is_zero(), "and no longer");
                }
            }
            let most = (i128::from(rate) * now.as_nanos() as i128 + bucket.burst()) / NANO;
            prop_assert!(i128::from(given) <= most + i128::from(largest) + 1);
        }
    }
}
