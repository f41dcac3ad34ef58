//! The account of whether prefetches are worth their cost.

/// The number of pages in one judgement.
const JUDGED: u64 = 16;

/// The credit, in pages, that right guesses earn beyond the limit of open pages. Streams end, so
/// some pages of a right guess stay untouched.
const CREDIT: i64 = 256;

/// The proofs skipped after the first adverse judgement, and at most.
const SKIPPED: (u64, u64) = (16, 1024);

/// The results of prefetches.
///
/// Only a limited number of pages may be open: fetched, with no result yet. So useless fetches cost
/// no more than these. If most judged pages left the cache untouched, the account skips proven
/// patterns. It skips twice as many each time, until a new guess proves right.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// The open pages. Right guesses lower the number, down to minus [`CREDIT`].
    open: i64,
    /// The used and wasted pages since the last judgement.
    used: u64,
    wasted: u64,
    /// The proofs still to skip, and the length of the last skip.
    skip: u64,
    skipped: u64,
}

impl Account {
    /// Returns whether to guess for a proven pattern. At most `most` pages may be open.
    pub(crate) fn allows(&mut self, most: u64) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.open < most as i64
    }

    /// Counts fetched pages.
    pub(crate) fn fetched(&mut self, pages: u64) {
        self.open += pages as i64;
    }

    /// Counts touched pages. Each makes up for one page without a result, besides itself.
    pub(crate) fn used(&mut self, pages: u64) {
        self.open = (self.open - 2 * pages as i64).max(-CREDIT);
        self.used += pages;
        self.judge();
    }

    /// Counts pages that left the cache without a known touch.
    pub(crate) fn wasted(&mut self, pages: u64) {
        self.close(pages);
        self.wasted += pages;
        self.judge();
    }

    /// Counts discarded pages, which say nothing about the guess.
    pub(crate) fn forgotten(&mut self, pages: u64) {
        self.close(pages);
    }

    fn close(&mut self, pages: u64) {
        // A negative number is credit, which stays for other guesses.
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
    fn wasted_guesses_are_retried_ever_more_rarely() {
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
