//! Whether what is fetched before it is touched is worth it.

/// Pages that are judged together.
const JUDGED: u64 = 16;

/// Pages that may be fetched for nothing beyond what may be open, where others turned out to be worth it: streams end.
const CREDIT: i64 = 256;

/// Proofs that are let go by after a first judgement against, and at most.
const SKIPPED: (u64, u64) = (16, 1024);

/// What became of pages that were fetched before they were touched.
///
/// At any time only so many may be here of which nothing is known yet, so what is fetched for nothing costs no more than these. When most
/// of those that are judged left the cache untouched, patterns are let go by without a guess: twice as many each time, until a guess is
/// tried again that turns out to be worth it.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Pages of which it is not known whether they are touched; less, and below nothing, where others were.
    open: i64,
    /// Those that are to be judged next.
    used: u64,
    wasted: u64,
    /// Proofs that are let go by still, and how many were at last.
    skip: u64,
    skipped: u64,
}

impl Account {
    /// Whether to guess, now that a pattern is proven; `most` pages may be open.
    pub(crate) fn allows(&mut self, most: u64) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.open < most as i64
    }

    /// Pages were fetched.
    pub(crate) fn fetched(&mut self, pages: u64) {
        self.open += pages as i64;
    }

    /// Some were touched, which makes up for as many that may not have been.
    pub(crate) fn used(&mut self, pages: u64) {
        self.open = (self.open - 2 * pages as i64).max(-CREDIT);
        self.used += pages;
        self.judge();
    }

    /// Some left the cache, and nobody had touched them as far as is known.
    pub(crate) fn wasted(&mut self, pages: u64) {
        self.settle(pages);
        self.wasted += pages;
        self.judge();
    }

    /// Some were discarded, which says nothing.
    pub(crate) fn forgotten(&mut self, pages: u64) {
        self.settle(pages);
    }

    fn settle(&mut self, pages: u64) {
        // What made up for them is for others.
        if self.open > 0 {
            self.open = (self.open - pages as i64).max(0);
        }
    }

    fn judge(&mut self) {
        if self.used + self.wasted < JUDGED {
            return;
        }
        let is_worth_it = self.used >= self.wasted;
        self.skipped = if is_worth_it { 0 } else { (2 * self.skipped).clamp(SKIPPED.0, SKIPPED.1) };
        self.skip = self.skipped;
        (self.used, self.wasted) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wasted_is_tried_again_ever_more_rarely() {
        let mut account = Account::default();
        let mut between = Vec::new();
        for _ in 0..10 {
            let proofs = (0..).take_while(|_| !account.allows(64)).count();
            between.push(proofs);
            account.fetched(JUDGED);
            account.wasted(JUDGED);
        }
        assert_eq!(between, [0, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]);
        account.fetched(JUDGED);
        account.used(JUDGED);
        assert!(account.allows(64));
    }

    #[test]
    fn no_more_is_fetched_than_may_be_open() {
        let mut account = Account::default();
        account.fetched(64);
        assert!(!account.allows(64));
        account.used(8);
        assert!(account.allows(64));
    }
}
