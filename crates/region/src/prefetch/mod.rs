//! Prefetchers, which choose pages to fetch before they are touched. A new one is a file here that
//! implements [`Prefetcher`], and a line in [`PrefetchKind`].
//!
//! A prefetcher sees one thread's faults on absent pages, in their order. It sees no touch of a
//! present page, prefetched or not. So a guess was right if the next fault is just behind the
//! guessed pages.

mod account;
mod sequential;
#[cfg(test)]
mod traces;
mod trend;

use std::cell::OnceCell;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::named::named;

pub(crate) use account::Account;
use sequential::Sequential;
use trend::Trend;

/// The most pages in one guess.
pub(crate) const MOST: u64 = 64;

/// The faults in a row that must follow a pattern before the first prefetch. Objects of a few pages
/// are no pattern.
const PROOF: usize = 3;

/// A guess after a fault: `count` pages, the first `stride` pages from the faulting one, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guess {
    pub(crate) stride: i64,
    pub(crate) count: u64,
}

impl Guess {
    /// Returns the guessed pages, for a guess after a fault on `after`.
    pub(crate) fn pages(self, after: u64) -> impl Iterator<Item = u64> {
        (1..=self.count as i64)
            .map_while(move |step| after.checked_add_signed(step.checked_mul(self.stride)?))
    }
}

/// A guess that was right: the next fault was just behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Proven {
    guess: Guess,
    behind: u64,
}

impl Proven {
    /// Returns the guessed pages, now known to have been touched.
    pub(crate) fn pages(self) -> impl Iterator<Item = u64> {
        let Guess { stride, count } = self.guess;
        Guess { stride: -stride, count }.pages(self.behind)
    }
}

/// A predictor of a thread's next touches.
pub(crate) trait Prefetcher: fmt::Debug + Send {
    /// Returns the guess that a fault on this page proves right. The caller calls
    /// [`after`](Self::after) with the page next.
    fn proven(&self, page: u64) -> Option<Proven>;

    /// Notes a fault on this page, and returns a guess. `most` returns the limit of pages, and is
    /// called only for a proven pattern.
    fn after(&mut self, page: u64, most: &dyn Fn() -> u64) -> Option<Guess>;
}

/// The prefetchers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrefetchKind {
    /// Fetches only pages that a program touches.
    Off,
    /// Fetches the pages that follow a stream of consecutive pages, for several streams at a time.
    Sequential,
    /// Follows the stride of most of the last faults (Maruf and Chowdhury, "Effectively Prefetching
    /// Remote Memory with Leap", USENIX ATC 2020).
    Trend,
    /// Uses the guess of `Sequential`, or else of `Trend`.
    #[default]
    Auto,
}

named!(
    PrefetchKind,
    "prefetcher": Off "off", Sequential "sequential", Trend "trend", Auto "auto"
);

impl PrefetchKind {
    /// Makes the prefetcher of a thread, or returns `None` for [`Off`](Self::Off).
    pub(crate) fn make(self) -> Option<Box<dyn Prefetcher>> {
        Some(match self {
            Self::Off => return None,
            Self::Sequential => Box::new(Sequential::default()),
            Self::Trend => Box::new(Trend::default()),
            Self::Auto => Box::new(Auto::default()),
        })
    }
}

#[derive(Debug, Default)]
struct Auto(Sequential, Trend);

impl Prefetcher for Auto {
    fn proven(&self, page: u64) -> Option<Proven> {
        self.0.proven(page).or_else(|| self.1.proven(page))
    }

    fn after(&mut self, page: u64, most: &dyn Fn() -> u64) -> Option<Guess> {
        let known = OnceCell::new();
        let most = || *known.get_or_init(most);
        let [sequential, trend] = [self.0.after(page, &most), self.1.after(page, &most)];
        sequential.or(trend)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the share of these touches that find their page present.
    fn found(kind: PrefetchKind, touches: impl IntoIterator<Item = u64>) -> f64 {
        let mut prefetcher = kind.make();
        let mut here = std::collections::HashSet::new();
        let (mut hits, mut all) = (0, 0);
        for page in touches {
            all += 1;
            if !here.insert(page) {
                hits += 1;
                continue;
            }
            let guess = prefetcher.as_mut().and_then(|prefetcher| prefetcher.after(page, &|| MOST));
            here.extend(guess.into_iter().flat_map(|guess| guess.pages(page)));
        }
        f64::from(hits) / f64::from(all)
    }

    fn mix(number: u64) -> u64 {
        let number = (number ^ (number >> 31)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (number ^ (number >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40
    }

    fn random(count: u64) -> impl Iterator<Item = u64> {
        (1..=count).map(mix)
    }

    #[test]
    fn a_scan_is_found_out_and_what_is_random_is_left_alone() {
        for kind in [PrefetchKind::Sequential, PrefetchKind::Trend, PrefetchKind::Auto] {
            assert!(found(kind, 1000..5000) > 0.9, "{kind}");
            assert!(found(kind, random(4000)) < 0.02, "{kind}");
        }
        assert_eq!(found(PrefetchKind::Off, 1000..5000), 0.0);
    }

    #[test]
    fn two_scans_at_a_time_are_two_streams() {
        let both = (0..2000).flat_map(|step| [step, 1_000_000 + step]);
        assert!(found(PrefetchKind::Sequential, both.clone()) > 0.9);
        assert!(found(PrefetchKind::Auto, both) > 0.9);
    }

    #[test]
    fn a_stride_is_a_trend_forwards_and_backwards_and_through_noise() {
        let noise = |step: u64| if step % 5 == 4 { mix(step) + 100_000_000 } else { step * 7 };
        for kind in [PrefetchKind::Trend, PrefetchKind::Auto] {
            assert!(found(kind, (0..4000).map(|step| step * 7)) > 0.8, "{kind}");
            assert!(found(kind, (0..4000).map(|step| 1_000_000 - step * 3)) > 0.8, "{kind}");
            assert!(found(kind, (0..4000).map(noise)) > 0.5, "{kind}");
        }
    }
}
