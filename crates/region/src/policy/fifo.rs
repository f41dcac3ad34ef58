//! The FIFO policy.

use super::Policy;
use super::list::List;

/// First in, first out.
#[derive(Debug)]
pub(super) struct Fifo(List);

impl Fifo {
    pub(super) fn new(pages: u64) -> Self {
        Self(List::new(pages))
    }
}

impl Policy for Fifo {
    fn came(&mut self, page: u64) {
        self.0.push(page);
    }

    fn went(&mut self, page: u64) {
        self.0.remove(page);
    }

    fn victim(&mut self) -> Option<u64> {
        let first = self.0.first()?;
        self.0.remove(first);
        Some(first)
    }

    fn looks_twice(&self) -> bool {
        false
    }
}
