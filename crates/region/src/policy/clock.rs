//! The CLOCK policy, and the hand that round-robin shares.

use super::Policy;

/// CLOCK: the hand visits pages by address. A page touched since the hand passed stays until its
/// next pass.
#[derive(Debug)]
pub(super) struct Clock {
    hand: Hand,
    looks_twice: bool,
}

impl Clock {
    pub(super) fn new(pages: u64) -> Self {
        Self { hand: Hand::new(pages), looks_twice: true }
    }

    /// Makes a clock that skips no page.
    pub(super) fn blind(pages: u64) -> Self {
        Self { looks_twice: false, ..Self::new(pages) }
    }
}

impl Policy for Clock {
    fn came(&mut self, page: u64) {
        self.hand.add(page);
    }

    fn went(&mut self, page: u64) {
        self.hand.remove(page);
    }

    fn victim(&mut self) -> Option<u64> {
        self.hand.next()
    }

    fn looks_twice(&self) -> bool {
        self.looks_twice
    }
}

/// The pages in the cache, a bit each, and a hand that cycles through them.
#[derive(Debug)]
struct Hand {
    bits: Vec<u64>,
    count: u64,
    at: u64,
}

impl Hand {
    fn new(pages: u64) -> Self {
        Self { bits: vec![0; pages.div_ceil(64) as usize], count: 0, at: 0 }
    }

    fn add(&mut self, page: u64) {
        let (word, bit) = (&mut self.bits[(page / 64) as usize], 1 << (page % 64));
        self.count += u64::from(*word & bit == 0);
        *word |= bit;
    }

    fn remove(&mut self, page: u64) {
        let (word, bit) = (&mut self.bits[(page / 64) as usize], 1 << (page % 64));
        self.count -= u64::from(*word & bit != 0);
        *word &= !bit;
    }

    /// Removes and returns the next page.
    fn next(&mut self) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        loop {
            let word = (self.at / 64) as usize % self.bits.len();
            let ahead = self.bits[word] & (u64::MAX << (self.at % 64));
            if ahead != 0 {
                let page = word as u64 * 64 + u64::from(ahead.trailing_zeros());
                self.remove(page);
                self.at = page + 1;
                return Some(page);
            }
            self.at = (word as u64 + 1) * 64 % (self.bits.len() as u64 * 64);
        }
    }
}
