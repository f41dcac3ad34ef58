use super::Policy;
use super::list::List;

/// SIEVE. A page that was touched goes back to where it stood, behind the hand, and the hand goes on.
///
/// The original asks a bit of each page that the hand comes by; here the answer comes later, when the page that was named
/// was touched before it left.
#[derive(Debug)]
pub(super) struct Sieve {
    /// In the order in which they came.
    pages: List,
    /// The next to be named; none: the first.
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
            // Just behind the hand, which has been here.
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
