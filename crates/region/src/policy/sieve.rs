//! The SIEVE policy.

use super::Policy;
use super::list::List;

/// SIEVE. A touched page returns to its position, just behind the hand, and the hand moves on.
///
/// The original reads a bit of each page that the hand passes. Here the answer comes later: the
/// named page is touched before it leaves.
#[derive(Debug)]
pub(super) struct Sieve {
    /// The pages, in the order in which they came.
    pages: List,
    /// The next page to name; `None` stands for the first.
    hand: Option<u64>,
}

impl Sieve {
    pub(super) fn new(pages: u64) -> Self {
        Self { pages: List::new(pages), hand: None }
    }

    fn pass(&mut self, page: u64) {
        if self.hand == Some(page) {
            self.hand = self.pages.after(page);
        }
        self.pages.remove(page);
    }
}

impl Policy for Sieve {
    fn came(&mut self, page: u64) {
        self.pages.push(page);
    }

    fn touched(&mut self, page: u64) {
        match self.hand {
            // This position is just behind the hand, which has passed it.
            Some(hand) => self.pages.insert_before(page, hand),
            None => self.pages.push(page),
        }
    }

    fn went(&mut self, page: u64) {
        self.pass(page);
    }

    fn victim(&mut self) -> Option<u64> {
        let page = self.hand.or_else(|| self.pages.first())?;
        self.hand = Some(page);
        self.pass(page);
        Some(page)
    }
}
