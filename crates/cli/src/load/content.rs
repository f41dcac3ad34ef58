//! Content that can be checked: it follows from a seed, a page's index and its number of writes.

use aquifer_page::PAGE_SIZE;

/// Pages of memory filled with content that can be checked.
///
/// A page is lost if a single byte differs from the last write. Zeros, another page's content and
/// content of an earlier generation all count as lost.
#[derive(Debug)]
pub(super) struct Pages {
    memory: Vec<u8>,
    /// Offset in bytes of the first whole page in `memory`.
    start: usize,
    seed: u64,
    generations: Vec<u32>,
}

impl Pages {
    /// Makes room for `count` pages, none of them written or touched yet.
    pub(super) fn new(count: usize, seed: u64) -> Self {
        // The kernel gives zeroed memory of this size, which takes no RAM until it is written.
        let memory = vec![0; (count + 1) * PAGE_SIZE];
        let start = memory.as_ptr().align_offset(PAGE_SIZE);
        Self { memory, start, seed, generations: vec![0; count] }
    }

    /// Returns how many pages there is room for.
    pub(super) fn len(&self) -> usize {
        self.generations.len()
    }

    /// Returns whether page `index` has been written.
    ///
    /// # Panics
    /// If there is no such page.
    pub(super) fn was_written(&self, index: usize) -> bool {
        self.generations[index] > 0
    }

    /// Writes the next generation of page `index`.
    ///
    /// # Panics
    /// If there is no such page.
    pub(super) fn write(&mut self, index: usize) {
        self.generations[index] += 1;
        let words = content(self.seed, index, self.generations[index]);
        for (place, word) in self.page_mut(index).chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Returns whether every byte of page `index` equals the last write; the page must be written.
    ///
    /// # Panics
    /// If there is no such page.
    pub(super) fn verify(&self, index: usize) -> bool {
        let words = content(self.seed, index, self.generations[index]);
        self.page(index).chunks_exact(8).zip(words).all(|(place, word)| place == word.to_le_bytes())
    }

    fn page(&self, index: usize) -> &[u8] {
        &self.memory[self.start + index * PAGE_SIZE..][..PAGE_SIZE]
    }

    fn page_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.memory[self.start + index * PAGE_SIZE..][..PAGE_SIZE]
    }
}

/// Returns the words of a page: SplitMix64, started from the seed, the index and the generation.
fn content(seed: u64, index: usize, generation: u32) -> impl Iterator<Item = u64> {
    let place = mix(seed ^ mix(index as u64) ^ mix(u64::from(generation) << 32));
    (1..).map(move |n: u64| mix(place.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15))))
}

/// Computes SplitMix64's output function: every bit of the result depends on every bit of `x`.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_content_is_verified() {
        let mut pages = Pages::new(5, 7);
        (0..5).for_each(|index| pages.write(index));
        pages.write(2);
        assert!((0..5).all(|index| pages.verify(index)));
    }

    #[test]
    fn a_single_wrong_bit_is_a_lost_page() {
        let mut pages = Pages::new(2, 7);
        (0..2).for_each(|index| pages.write(index));
        pages.page_mut(1)[4095] ^= 1;
        assert!(pages.verify(0) && !pages.verify(1));
    }

    #[test]
    fn zeros_stale_pages_and_pages_of_others_are_lost() {
        let mut pages = Pages::new(2, 7);
        assert!(!pages.verify(0), "never written");
        pages.write(0);
        let first = pages.page(0).to_owned();
        pages.write(0);
        pages.page_mut(0).copy_from_slice(&first);
        assert!(!pages.verify(0), "content of an earlier generation");
        pages.write(1);
        pages.page_mut(1).copy_from_slice(&first);
        assert!(!pages.verify(1), "another page's content");
    }

    #[test]
    fn pages_are_pages_of_the_kernel() {
        assert_eq!(Pages::new(1, 0).page(0).as_ptr().align_offset(PAGE_SIZE), 0);
    }
}
