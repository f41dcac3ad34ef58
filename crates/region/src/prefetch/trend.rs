//! The prefetcher of strides, by Leap's majority trend.

use std::collections::VecDeque;

use super::{Guess, PROOF, Prefetcher, Proven};

/// The number of remembered steps (Leap, section 4.1: a history of 32).
const HISTORY: usize = 32;

/// The shortest window of steps for the majority. Leap, algorithm 1, begins with few steps and
/// doubles the window.
const FEWEST: usize = 4;

/// Leap's majority trend. If most of the last steps have one stride, and the very last ones too,
/// the next pages lie along it. A window doubles each time that the thread continues just behind
/// it, even after other faults. Otherwise it begins small again.
#[derive(Debug, Default)]
pub(super) struct Trend {
    last: Option<u64>,
    /// The steps, the latest first.
    steps: VecDeque<i64>,
    /// The last guess, and the page just behind it.
    guessed: Option<(Guess, u64)>,
}

/// The size in pages of the first guess for a new trend.
const FIRST: u64 = 4;

impl Trend {
    fn remember(&mut self, step: i64) {
        self.steps.truncate(HISTORY - 1);
        self.steps.push_front(step);
    }

    /// Returns whether the last steps all had this stride. Otherwise the thread is elsewhere, or an
    /// object was just that long.
    fn is_proven(&self, stride: i64) -> bool {
        self.steps.len() >= PROOF && self.steps.iter().take(PROOF).all(|step| *step == stride)
    }

    /// Returns the stride of more than half of the last steps, by the vote of Boyer and Moore and a
    /// count.
    fn majority(&self) -> Option<i64> {
        let mut looked_at = FEWEST;
        while looked_at <= self.steps.len() {
            let steps = || self.steps.iter().take(looked_at).copied();
            let (mut stride, mut votes) = (0, 0_usize);
            for step in steps() {
                match votes {
                    0 => (stride, votes) = (step, 1),
                    _ if step == stride => votes += 1,
                    _ => votes -= 1,
                }
            }
            if stride != 0 && 2 * steps().filter(|step| *step == stride).count() > looked_at {
                return Some(stride);
            }
            looked_at *= 2;
        }
        None
    }
}

impl Prefetcher for Trend {
    fn proven(&self, page: u64) -> Option<Proven> {
        let (guess, behind) = self.guessed.filter(|(_, behind)| *behind == page)?;
        Some(Proven { guess, behind })
    }

    fn after(&mut self, page: u64, most: &dyn Fn() -> u64) -> Option<Guess> {
        let step = self.last.map(|last| page.wrapping_sub(last) as i64);
        self.last = Some(page);
        let count = match self.guessed.take_if(|(_, behind)| *behind == page) {
            Some((guess, _)) => {
                // The thread touched the guessed pages, and each was a step.
                (0..=guess.count.min(HISTORY as u64)).for_each(|_| self.remember(guess.stride));
                (2 * guess.count).max(FIRST)
            }
            None => {
                self.remember(step?);
                FIRST
            }
        };
        let stride = self.majority().filter(|stride| self.is_proven(*stride))?;
        let count = count.min(most());
        let guess = Guess { stride, count };
        let behind = page.checked_add_signed(stride * (count as i64 + 1))?;
        self.guessed = (count > 0).then_some((guess, behind));
        (count > 0).then_some(guess)
    }
}
