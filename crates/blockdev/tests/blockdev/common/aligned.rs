//! A page-aligned buffer.

use std::ops::{Deref, DerefMut};

use aquifer_page::PAGE_SIZE;

/// A buffer that starts at a page boundary, as direct I/O requires.
pub struct Aligned {
    data: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub fn new(len: usize) -> Self {
        let data = vec![0; len + PAGE_SIZE];
        let start = data.as_ptr().align_offset(PAGE_SIZE);
        Self { data, start, len }
    }
}

impl Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.data[self.start..self.start + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.data[self.start..self.start + self.len]
    }
}
