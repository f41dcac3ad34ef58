//! A bitmap of the pages of an extent that may hold data other than zeroes.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_page::{PAGE_SIZE, PAGES_PER_EXTENT};

const WORDS: usize = (PAGES_PER_EXTENT / 64) as usize;
const PAGE: u64 = PAGE_SIZE as u64;

/// A bit for each page of an extent: 2 KiB for 64 MiB.
///
/// An unset bit is a promise: the page reads as zeroes in its slot. So a thread sets the bit before
/// a write and clears it after a discard.
///
/// To set bits, a thread holds the extent's place and the parts concerned shared. To clear bits, it
/// holds those parts exclusively. To rely on bits that stay unset, it holds the place exclusively.
/// These locks order the accesses, so the atomics need no ordering of their own.
#[derive(Debug)]
pub(crate) struct Bitmap(Box<[AtomicU64]>);

/// Returns the pages that bytes of an extent touch.
fn touched(bytes: &Range<u64>) -> Range<u64> {
    if bytes.is_empty() { 0..0 } else { bytes.start / PAGE..bytes.end.div_ceil(PAGE) }
}

/// Returns the pages that bytes of an extent cover whole.
fn covered(bytes: &Range<u64>) -> Range<u64> {
    let (start, end) = (bytes.start.div_ceil(PAGE), bytes.end / PAGE);
    start..end.max(start)
}

/// Returns the words that a range of pages lies in, each with the bits of those pages.
fn words(pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let last = if pages.is_empty() { pages.start / 64 } else { pages.end.div_ceil(64) };
    (pages.start / 64..last).map(move |word| {
        let from = pages.start.saturating_sub(word * 64).min(63);
        let to = (pages.end - word * 64).min(64);
        (word as usize, (u64::MAX << from) & (u64::MAX >> (64 - to)))
    })
}

impl Bitmap {
    pub(crate) fn new() -> Self {
        Self((0..WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Marks the pages that these bytes touch.
    pub(crate) fn set(&self, bytes: &Range<u64>) {
        for (word, bits) in words(touched(bytes)) {
            // Most writes go to pages that are marked already: spare other CPUs the cache line.
            if self.0[word].load(Ordering::Relaxed) & bits != bits {
                self.0[word].fetch_or(bits, Ordering::Relaxed);
            }
        }
    }

    /// Clears the pages that these bytes cover whole.
    pub(crate) fn clear(&self, bytes: &Range<u64>) {
        for (word, bits) in words(covered(bytes)) {
            self.0[word].fetch_and(!bits, Ordering::Relaxed);
        }
    }

    /// Returns the smallest range within these bytes that covers all marked pages; empty if there
    /// are none.
    pub(crate) fn trim(&self, bytes: &Range<u64>) -> Range<u64> {
        let set = |(word, bits): (usize, u64)| {
            let found = self.0[word].load(Ordering::Relaxed) & bits;
            (found != 0).then_some((word as u64 * 64, found))
        };
        let pages = touched(bytes);
        let Some((base, first)) = words(pages.clone()).find_map(set) else {
            return bytes.start..bytes.start;
        };
        let start = base + u64::from(first.trailing_zeros());
        let end = words(pages)
            .filter_map(set)
            .last()
            .map_or(start, |(base, last)| base + 64 - u64::from(last.leading_zeros()));
        (start * PAGE).max(bytes.start)..(end * PAGE).min(bytes.end)
    }

    pub(crate) fn is_set(&self, page: u64) -> bool {
        self.0[(page / 64) as usize].load(Ordering::Relaxed) >> (page % 64) & 1 == 1
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// Counts the marked pages.
    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use aquifer_page::EXTENT_SIZE;

    use super::*;

    #[test]
    fn a_partly_written_page_is_set_and_only_a_whole_one_cleared() {
        let bitmap = Bitmap::new();
        bitmap.set(&(4095..4097));
        assert_eq!(bitmap.count(), 2);
        bitmap.clear(&(1..8192));
        assert!(bitmap.is_set(0) && !bitmap.is_set(1));
        bitmap.clear(&(0..4096));
        assert!(bitmap.is_empty());
        bitmap.set(&(5..5));
        assert!(bitmap.is_empty());
    }

    #[test]
    fn a_whole_extent_is_set_and_cleared_at_once() {
        let bitmap = Bitmap::new();
        bitmap.set(&(0..EXTENT_SIZE));
        assert_eq!(bitmap.count(), PAGES_PER_EXTENT);
        assert_eq!(bitmap.trim(&(100..EXTENT_SIZE - 100)), 100..EXTENT_SIZE - 100);
        bitmap.clear(&(0..EXTENT_SIZE));
        assert!(bitmap.is_empty());
    }

    #[test]
    fn a_range_is_trimmed_to_the_pages_that_are_set() {
        let bitmap = Bitmap::new();
        let all = 0..EXTENT_SIZE;
        assert!(bitmap.trim(&all).is_empty());
        for pages in [3..4, 60..70, 64..65, 127..129, 16_383..16_384] {
            let bitmap = Bitmap::new();
            bitmap.set(&(pages.start * PAGE..pages.end * PAGE));
            assert_eq!(bitmap.trim(&all), pages.start * PAGE..pages.end * PAGE);
            assert!(bitmap.trim(&(0..pages.start * PAGE)).is_empty());
            assert!(bitmap.trim(&(pages.end * PAGE..EXTENT_SIZE)).is_empty());
            let inside = pages.start * PAGE + 7..pages.start * PAGE + 9;
            assert_eq!(bitmap.trim(&inside), inside);
        }
    }
}
