//! The expected content of pages.

use aquifer_page::{PAGE_SIZE, is_zero};

use crate::common::Random;

/// Returns a few contents, so that pages are often equal or nearly equal.
pub fn contents() -> Vec<Vec<u8>> {
    let mut random = Random(7);
    let mut all: Vec<Vec<u8>> = Vec::new();
    for number in 0..32 {
        let mut content = vec![0; PAGE_SIZE];
        match number % 4 {
            // Equal to the previous content except for the last byte.
            1 => {
                content.clone_from(&all[number - 1]);
                content[PAGE_SIZE - 1] ^= 1;
            }
            // The second half is zero.
            2 => random.fill(&mut content[..PAGE_SIZE / 2]),
            _ => random.fill(&mut content),
        }
        all.push(content);
    }
    all
}

/// Expected pages that one thread alone changes; `None` is a hole.
pub struct Pages(pub Vec<Option<Vec<u8>>>);

impl Pages {
    pub fn holes(count: usize) -> Self {
        Self(vec![None; count])
    }

    pub fn write(&mut self, page: usize, at: usize, data: &[u8]) {
        let mut content = self.content(page);
        content[at..at + data.len()].copy_from_slice(data);
        self.0[page] = Some(content).filter(|content| !is_zero(content));
    }

    pub fn discard(&mut self, page: usize, at: usize, length: usize) {
        if self.0[page].is_some() {
            self.write(page, at, &vec![0; length]);
        }
    }

    pub fn allocate_zeroes(&mut self, page: usize, at: usize, length: usize) {
        let mut content = self.content(page);
        content[at..at + length].fill(0);
        self.0[page] = Some(content);
    }

    pub fn content(&self, page: usize) -> Vec<u8> {
        self.0[page].clone().unwrap_or_else(|| vec![0; PAGE_SIZE])
    }
}
