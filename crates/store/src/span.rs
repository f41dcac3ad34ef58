//! Byte ranges of a lease, and their pages.

use std::ops::Range;

use aquifer_page::PAGE_SIZE;

/// Pages locked at once, 1 MiB: enough to punch and copy in large pieces, few enough that a thread
/// that waits for one of them waits shortly.
pub(crate) const CHUNK_PAGES: usize = 256;

/// A range of bytes in a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    start: usize,
    end: usize,
}

impl Span {
    /// Makes a span of `length` bytes at `offset`; the caller has checked that it is inside the
    /// lease.
    pub(crate) fn new(offset: u64, length: u64) -> Self {
        let start = offset as usize;
        Self { start, end: start + length as usize }
    }

    /// Returns all pages that the span touches.
    pub(crate) fn pages(&self) -> Range<usize> {
        if self.start == self.end {
            return 0..0;
        }
        self.start / PAGE_SIZE..self.end.div_ceil(PAGE_SIZE)
    }

    /// Returns the pages in pieces of at most [`CHUNK_PAGES`].
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let pages = self.pages();
        pages.clone().step_by(CHUNK_PAGES).map(move |at| at..pages.end.min(at + CHUNK_PAGES))
    }

    /// Returns the part of `pages` that belongs to the span, relative to the span's start.
    pub(crate) fn of_span(&self, pages: &Range<usize>) -> Range<usize> {
        let (from, to) = self.clip(pages);
        from - self.start..to - self.start
    }

    /// Returns the part of `pages` that belongs to the span, relative to the start of the first
    /// page.
    pub(crate) fn of_pages(&self, pages: &Range<usize>) -> Range<usize> {
        let (from, to) = self.clip(pages);
        let base = pages.start * PAGE_SIZE;
        from - base..to - base
    }

    /// Returns whether the span covers only a part of this page.
    pub(crate) fn cuts(&self, page: usize) -> bool {
        self.of_pages(&(page..page + 1)).len() < PAGE_SIZE
    }

    fn clip(&self, pages: &Range<usize>) -> (usize, usize) {
        (self.start.max(pages.start * PAGE_SIZE), self.end.min(pages.end * PAGE_SIZE))
    }
}

/// Splits `pages` into runs of pages with equal `key`.
pub(crate) fn runs<K: PartialEq>(
    pages: Range<usize>,
    key: impl Fn(usize) -> K,
) -> impl Iterator<Item = (Range<usize>, K)> {
    let mut at = pages.start;
    std::iter::from_fn(move || {
        (at < pages.end).then(|| {
            let (start, first) = (at, key(at));
            at += 1;
            while at < pages.end && key(at) == first {
                at += 1;
            }
            (start..at, first)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_knows_its_part_of_each_page() {
        let span = Span::new(4000, 5000);
        assert_eq!(span.pages(), 0..3);
        assert_eq!(span.of_pages(&(0..1)), 4000..4096);
        assert_eq!(span.of_span(&(0..1)), 0..96);
        assert_eq!(span.of_pages(&(1..3)), 0..4904);
        assert_eq!(span.of_span(&(1..3)), 96..5000);
        assert!(span.cuts(0) && !span.cuts(1) && span.cuts(2));
        assert_eq!(Span::new(4096, 0).pages(), 0..0);
    }

    #[test]
    fn runs_join_neighbours_that_agree() {
        let all: Vec<_> = runs(3..9, |page| page / 4).collect();
        assert_eq!(all, [(3..4, 0), (4..8, 1), (8..9, 2)]);
        assert_eq!(runs(5..5, |page| page).count(), 0);
    }
}
