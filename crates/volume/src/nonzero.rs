//! A record of the pages of an extent that were stored with data other than zeroes.

use aquifer_page::{PAGE_SIZE, is_zero};

use crate::bitmap::Bitmap;

const PAGE: u64 = PAGE_SIZE as u64;

/// A bit for each page of an extent. If it is set, the lender acknowledged data other than zeroes
/// there. Zeroes then prove that the lender has lost the page, or withholds it.
///
/// A writer clears a bit before its write or discard begins, and sets it when the lender has
/// acknowledged the write. A read proves nothing unless no write was under way during it.
#[derive(Debug)]
pub(crate) struct NonZero(Bitmap);

impl NonZero {
    pub(crate) fn new() -> Self {
        Self(Bitmap::new())
    }

    /// Clears the bits of these bytes, before a write or discard begins.
    pub(crate) fn forget(&self, at: u64, length: u64) {
        self.0.clear_touched(&(at..at + length));
    }

    /// Sets the bits of pages into which a finished write put anything but zeroes.
    pub(crate) fn remember(&self, at: u64, data: &[u8]) {
        pages(at, data)
            .filter(|(_, part)| !is_zero(part))
            .for_each(|(at, _)| self.0.set(&(at..at + 1)));
    }

    /// Sets the bits of these bytes, which are known to hold data in every page.
    pub(crate) fn set(&self, bytes: &std::ops::Range<u64>) {
        self.0.set(bytes);
    }

    /// Returns whether the data contradicts the stored data. Whole pages alone can prove that.
    pub(crate) fn disproves(&self, at: u64, data: &[u8]) -> bool {
        let is_bad = |(at, page): (u64, &[u8])| {
            page.len() == PAGE_SIZE && self.0.is_set(at / PAGE) && is_zero(page)
        };
        pages(at, data).any(is_bad)
    }
}

/// Cuts bytes at page borders.
fn pages(at: u64, data: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let (mut at, mut rest) = (at, data);
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let length = (PAGE - at % PAGE).min(rest.len() as u64);
        let (now, later) = rest.split_at(length as usize);
        let found = (at, now);
        (at, rest) = (at + length, later);
        Some(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZEROES: [u8; 2 * PAGE_SIZE] = [0; 2 * PAGE_SIZE];

    #[test]
    fn zeroes_are_believed_unless_something_else_was_stored() {
        let nonzero = NonZero::new();
        assert!(!nonzero.disproves(0, &ZEROES));
        nonzero.remember(PAGE, &[1; PAGE_SIZE]);
        assert!(nonzero.disproves(0, &ZEROES));
        assert!(!nonzero.disproves(PAGE, &[1; PAGE_SIZE]));
        assert!(!nonzero.disproves(PAGE, &ZEROES[..512]), "a part of a page may be zero");
        nonzero.forget(PAGE, PAGE);
        nonzero.remember(PAGE, &ZEROES[..PAGE_SIZE]);
        assert!(!nonzero.disproves(0, &ZEROES));
    }

    #[test]
    fn writing_zeroes_to_part_of_a_page_forgets_the_page() {
        let nonzero = NonZero::new();
        nonzero.remember(100, &[1; 8]);
        assert!(nonzero.disproves(0, &ZEROES));
        nonzero.forget(100, 8);
        nonzero.remember(100, &[0; 8]);
        assert!(!nonzero.disproves(0, &ZEROES));
    }
}
