use super::Policy;
use super::clock::Hand;

/// By address, round and round.
#[derive(Debug)]
pub(super) struct RoundRobin(Hand);

impl RoundRobin {
    pub(super) fn new(pages: u64) -> Self {
        Self(Hand::new(pages))
    }
}

impl Policy for RoundRobin {
    fn came(&mut self, page: u64) {
        self.0.add(page);
    }

    fn went(&mut self, page: u64) {
        self.0.remove(page);
    }

    fn victim(&mut self) -> Option<u64> {
        self.0.next()
    }

    fn looks_twice(&self) -> bool {
        false
    }
}
