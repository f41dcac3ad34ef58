//! The random policy.

use super::Policy;

const NONE: u32 = u32::MAX;

/// A random choice among the pages in the cache.
#[derive(Debug)]
pub(super) struct Random {
    pages: Vec<u32>,
    /// The index of each page in `pages`.
    at: Vec<u32>,
    state: u64,
}

impl Random {
    pub(super) fn new(pages: u64) -> Self {
        Self { pages: Vec::new(), at: vec![NONE; pages as usize], state: 0x9e37_79b9_7f4a_7c15 }
    }

    /// Returns the next number of xorshift64*. The choice of a page need not be secret.
    fn number(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn take(&mut self, index: usize) -> u64 {
        let page = self.pages.swap_remove(index);
        if let Some(moved) = self.pages.get(index) {
            self.at[*moved as usize] = index as u32;
        }
        self.at[page as usize] = NONE;
        page.into()
    }
}

impl Policy for Random {
    fn came(&mut self, page: u64) {
        if self.at[page as usize] == NONE {
            self.at[page as usize] = self.pages.len() as u32;
            self.pages.push(page as u32);
        }
    }

    fn went(&mut self, page: u64) {
        if self.at[page as usize] != NONE {
            self.take(self.at[page as usize] as usize);
        }
    }

    fn victim(&mut self) -> Option<u64> {
        if self.pages.is_empty() {
            return None;
        }
        let index = self.number() % self.pages.len() as u64;
        Some(self.take(index as usize))
    }

    fn looks_twice(&self) -> bool {
        false
    }
}
